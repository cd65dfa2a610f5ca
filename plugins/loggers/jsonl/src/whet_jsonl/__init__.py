"""Metrics as JSON lines, in a file or on standard output."""
