"""The kernel of attention is named for each size of heads. No GPU: what is printed there is printed for its device."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from whet_fsdp2 import loading


def test_layers_with_heads_of_two_sizes_are_both_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoConfig.for_model(
        "gemma4_text", vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=16, layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=50, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
    )  # fmt: skip
    monkeypatch.setattr(loading, "local", lambda tensor: SimpleNamespace(device=torch.device("cuda")))
    loading._name_kernel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"attention of packed rows, heads of {size}" for size in (8, 16)
    ]
