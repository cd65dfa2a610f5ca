"""Experts that compute sorted tokens: values and gradients are those of `transformers`, on a CPU and on a GPU."""

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import grouped_mm_experts_forward

from whet_fsdp2 import sorted_experts
from whet_fsdp2.sorted_experts import NAME, compute_experts, hasten_experts

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
KINDS = {
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 16},
    "mixtral": {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3},
}


def made(kind, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def experts_of(model):
    return model.model.layers[0].mlp.experts


def computed(forward, experts, hidden, chosen, weights, upstream):
    out = forward(experts, hidden, chosen, weights)
    return [out, *torch.autograd.grad(out, (hidden, weights, experts.gate_up_proj, experts.down_proj), upstream)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unused", [(), (0, 3, 5)], ids=["all", "some"])
def test_values_and_gradients_are_those_of_transformers(kind, dtype, device, unused):
    experts = experts_of(made(kind, dtype, device))
    hidden, upstream = (torch.randn(50, 32, dtype=dtype, device=device) for _ in range(2))
    scores = torch.randn(50, 6, device=device)
    scores[:, list(unused)] = -torch.inf
    weights, chosen = scores.softmax(-1).topk(3, -1)
    inputs = hidden.requires_grad_(), chosen, weights.to(dtype).detach().requires_grad_(), upstream
    theirs, ours = (computed(one, experts, *inputs) for one in (grouped_mm_experts_forward, compute_experts))
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        assert (found - expected).norm() <= near * expected.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_the_same_bits_each_time(device):
    experts = experts_of(made("qwen3_moe", device=device))
    hidden, upstream = (torch.randn(400, 32, device=device) for _ in range(2))
    weights, chosen = torch.randn(400, 6, device=device).softmax(-1).topk(3, -1)
    inputs = hidden.requires_grad_(), chosen, weights.detach().requires_grad_(), upstream
    first, second = (computed(compute_experts, experts, *inputs) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("lora", [None, {"rank": 2, "experts": True}], ids=["all", "adapter"])
def test_a_worker_trains_with_it(make_worker, moe, lora):
    config = make_worker(folder=moe, lora=lora)._root.model.config
    assert config._experts_implementation == NAME


def outputs_of(model):
    return lambda: model(input_ids=torch.arange(9)[None]).logits[0, :, 0].detach().numpy()


def failing(*given):
    raise TypeError("two arguments were wanted")


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda *given: 2 * compute_experts(*given), "its outputs differ by"),
        (failing, "TypeError: two arguments were wanted"),
    ],
)
def test_a_model_that_computes_something_else_is_left_alone(monkeypatch, caplog, other, problem):
    model = made("qwen3_moe")
    outputs = outputs_of(model)
    expected = outputs()

    def difference():
        return abs(outputs() - expected).max()

    assert hasten_experts(model, difference, 1e-4)
    model.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(sorted_experts, "compute_experts", other)
    with caplog.at_level(logging.WARNING):
        assert not hasten_experts(model, difference, 1e-4)
    assert f"Qwen3MoeForCausalLM compute as transformers does, not sorted: {problem}" in caplog.text
    assert (outputs() == expected).all()


def test_experts_that_are_split_or_have_more_parts_keep_their_own_pass():
    def ep_forward(*given):
        raise AssertionError

    for change in ({"has_bias": True}, {"has_gate": False}, {"has_post_expert_norm": True}, {"forward": ep_forward}):
        model = made("qwen3_moe")
        vars(experts_of(model)).update(change)
        assert not hasten_experts(model, None, 1e-4)
        assert model.config._experts_implementation == "grouped_mm"
