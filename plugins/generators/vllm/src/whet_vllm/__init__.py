"""Generate with vLLM: one engine for each rank, weights handed over through its own interface."""
