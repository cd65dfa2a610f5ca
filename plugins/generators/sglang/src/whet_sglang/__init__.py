"""Generate with SGLang: one engine for each rank; weights arrive through SGLang's own interface."""
