"""Slices of a cluster, the workers on them, and the wire between."""

WIRE_FORMAT = 10
"""Of what crosses between driver and workers; raised with every change that another core would misunderstand."""
