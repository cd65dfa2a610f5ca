"""The memory of roles, phase by phase: predicted before a run, measured during it, and compared after it."""
