"""The plan of a run: config and facts in, where everything runs and whether it fits out. Pure, and without torch."""
