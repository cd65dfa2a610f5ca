"""Generate with vLLM: one engine for each rank; weights arrive through vLLM's own interface."""
