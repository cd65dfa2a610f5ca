"""Rewards from a judge model, for example a reward model."""
