"""Train Hugging Face causal language models with PyTorch FSDP2."""
