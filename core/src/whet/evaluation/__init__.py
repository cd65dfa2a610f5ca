"""Evaluations: episodes played, scores of tasks, estimates with intervals, and comparisons of two."""
