"""Worker groups on a cluster, their workers, and the wire to the driver."""

WIRE_FORMAT = 15
"""Of what crosses between driver and workers; raised with every change that another core would misunderstand."""
