"""Compute, before a process is forked, what each process with a model would compute again.

When a process loads its first model, transformers builds the names of the weights of all its models, and TorchScript
compiles the layers of the `hf` generator. In a small run that is half of the time of a worker.
"""

import tempfile
from contextlib import suppress
from importlib import import_module
from typing import Any


def tables() -> None:
    """Build the tables of transformers. Later calls do nothing."""
    with suppress(ImportError, AttributeError):  # another version of transformers
        import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


def decoding() -> None:
    """Load and decode a small model with the `hf` generator. The process has no more threads than before."""
    loading: Any = import_module("whet_hf.loading")
    transformers: Any = import_module("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        model = loading.load_model(folder, "float32", "cpu", trust_remote_code=False)
    loading.choose_decoder(model, fused=True)
