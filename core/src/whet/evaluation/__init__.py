"""Evaluations: playing episodes, scores of tasks, estimates with intervals, and comparisons of two evaluations."""
