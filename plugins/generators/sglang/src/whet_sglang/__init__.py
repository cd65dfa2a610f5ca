"""Generate with SGLang: one engine for each rank, weights handed over through its own interface."""
