"""The launcher `ray` of whet: worker processes on the nodes of a Ray cluster."""
