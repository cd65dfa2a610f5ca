"""Curves of a run as a PNG."""
