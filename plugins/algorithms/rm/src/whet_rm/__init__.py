"""Reward models: the score of an answer, learned from pairs."""
