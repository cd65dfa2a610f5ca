"""Preference optimisation: DPO and its relatives, and KTO."""
