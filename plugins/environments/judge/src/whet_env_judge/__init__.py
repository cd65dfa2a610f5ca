"""Rewards from a model that judges answers."""
