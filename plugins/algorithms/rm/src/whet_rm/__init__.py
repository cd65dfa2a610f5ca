"""Reward models: the score of a response, learned from pairs."""
