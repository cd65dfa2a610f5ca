"""Which weights are vectors, whatever their number of dimensions."""

import pytest

from whet_weights.vectors import is_vector


@pytest.mark.parametrize(
    ("name", "ndim"),
    [
        ("model.norm.weight", 1),
        ("model.layers.0.self_attn.q_proj.bias", 1),
        ("model.layers.0.mlp.experts.down_proj_bias", 2),  # gpt-oss: one for each expert
        ("model.layers.0.mlp.gate.moe_statics.e_score_correction_bias", 2),  # ERNIE 4.5
        ("model.layers.0.mamba.A_log", 2),  # Jamba
        ("model.layers.0.mamba.D", 2),  # Zamba
        ("model.layers.0.self_attn.q_norm.weight", 2),  # Cohere: one for each head
        ("rwkv.blocks.0.attention.time_mix_key", 3),
    ],
)
def test_vectors_and_stacks_of_them_are_vectors(name: str, ndim: int) -> None:
    assert is_vector(name, ndim)


@pytest.mark.parametrize(
    ("name", "ndim"),
    [
        ("model.embed_tokens.weight", 2),
        ("model.layers.0.self_attn.q_proj.weight", 2),
        ("model.layers.0.mlp.gate.weight", 2),
        ("model.layers.0.mlp.experts.down_proj", 3),
        ("model.layers.0.mamba.conv1d.weight", 3),
        ("model.layers.0.norm1.linear.weight", 2),
        ("model.layers.0.self_attn.q_proj.lora_B.weight", 2),
        ("score.weight", 2),
    ],
)
def test_matrices_are_no_vectors(name: str, ndim: int) -> None:
    assert not is_vector(name, ndim)
