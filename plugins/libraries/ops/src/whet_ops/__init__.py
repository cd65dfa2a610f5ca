"""Pure formulas: reductions and advantages on NumPy, logprobs, KL and losses on torch."""
