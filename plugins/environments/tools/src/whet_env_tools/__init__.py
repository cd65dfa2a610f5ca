"""Tools: a calculator that the model calls in an episode of two turns."""
