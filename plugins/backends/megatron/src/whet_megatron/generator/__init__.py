"""Megatron's own inference as a generator."""
