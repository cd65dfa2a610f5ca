"""Generate with plain transformers models: batched decoding on any device."""
