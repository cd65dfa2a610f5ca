"""Slices of a cluster, the workers on them, and the wire between."""
