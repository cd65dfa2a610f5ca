"""Metrics and config of a run for TensorBoard."""
