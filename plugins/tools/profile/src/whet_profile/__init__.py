"""Traces of chosen steps, by torch.profiler."""
