"""Metrics, histograms and config of a run for TensorBoard."""
