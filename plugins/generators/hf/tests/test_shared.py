"""Modules around tensors of somebody else, and an adapter beside them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from whet.errors import ConfigError, WhetError
from whet_hf.fused import FusedDecoder
from whet_hf.loading import choose_decoder, load_model
from whet_hf.shared import Adapter, model_around
from whet_weights import adapter as peft

FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe", "mixtral")
TOKENS = torch.arange(3, 40).view(1, -1)


def named(model: Any) -> dict[str, torch.Tensor]:
    """Return what a backend lends."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@pytest.fixture(params=FAMILIES)
def pair(request: Any, tiny_models: Callable[..., Path]) -> tuple[Any, Any]:
    """A model that was loaded, and one around its tensors."""
    folder = str(tiny_models(request.param, tied=request.param != "mixtral"))
    loaded = load_model(folder, "float32", "cpu", False)
    return loaded, model_around(named(loaded), folder, "float32", "cpu", False)


@torch.no_grad()
def test_a_model_around_tensors_computes_as_the_loaded_one_and_holds_nothing_of_its_own(pair: tuple[Any, Any]) -> None:
    loaded, around = pair
    assert torch.equal(around(input_ids=TOKENS).logits, loaded(input_ids=TOKENS).logits)
    places = {tensor.data_ptr() for tensor in named(loaded).values()}
    assert {tensor.data_ptr() for tensor in named(around).values()} == places
    assert not around.training
    assert not any(parameter.requires_grad for parameter in around.parameters())
    loaded.get_input_embeddings().weight.mul_(2)
    assert torch.equal(around(input_ids=TOKENS).logits, loaded(input_ids=TOKENS).logits)


@torch.no_grad()
def test_an_adapter_beside_the_weights_computes_what_it_does_when_merged(pair: tuple[Any, Any]) -> None:
    _, around = pair
    base, rank, scaling = around(input_ids=TOKENS).logits, 3, 1.7
    weights = {n: w for n, w in around.named_parameters() if ".layers." in n and w.ndim > 1 and "gate.weight" not in n}
    turned = {n: bool(getattr(around.get_submodule(n.rpartition(".")[0]), "is_transposed", False)) for n in weights}
    draw, pairs = torch.Generator().manual_seed(0), {}
    for name, weight in weights.items():
        *experts, out, size = weight.mT.shape if turned[name] else weight.shape
        sizes = (*experts, rank, size), (*experts, out, rank)
        pairs[name] = tuple(0.1 * torch.randn(size, generator=draw) for size in sizes)
    adapter = Adapter(around)
    adapter.use({name: (2 * a, b) for name, (a, b) in pairs.items()}, scaling)  # which the next one replaces
    adapter.use(pairs, scaling)
    beside = around(input_ids=TOKENS).logits
    assert (beside - base).abs().max() > 0.01
    before = {name: weight.clone() for name, weight in weights.items()}
    adapter.use({}, 1.0)
    for name, weight in weights.items():
        weight.copy_(peft.merged(weight, *pairs[name], scaling, transposed=turned[name]))
    torch.testing.assert_close(beside, around(input_ids=TOKENS).logits, atol=1e-4, rtol=1e-4)
    for name, weight in weights.items():
        weight.copy_(before[name])
    assert torch.equal(around(input_ids=TOKENS).logits, base)


@torch.inference_mode()
def decoded(decoder: Any) -> Tensor:
    """Return the logits of two prompts and two more tokens of each."""
    session = decoder.begin([TOKENS[0, :5], TOKENS[0, :9]], torch.tensor([0, 1, 1]), room=3)
    found = [session.logits]
    for token in (5, 7):
        session.step(torch.full((3,), token))
        found.append(session.logits)
    return torch.cat(found)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_the_fused_decoder_computes_in_place_and_with_an_adapter(
    tiny_models: Callable[..., Path], tmp_path: Path, family: str, bias: bool
) -> None:
    folder = tiny_models(family, tied=family == "llama")
    if bias:  # of all linears of the attention, where the family can have them
        folder = shutil.copytree(folder, tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight)
        model.save_pretrained(folder)
    lender = load_model(str(folder), "float32", "cpu", False)
    model = model_around(named(lender), str(folder), "float32", "cpu", False)
    places = {name: tensor.data_ptr() for name, tensor in named(model).items()}
    fused = choose_decoder(model, fused=True, movable=False)
    assert isinstance(fused, FusedDecoder)
    plain, draw, pairs = choose_decoder(model, fused=False), torch.Generator().manual_seed(0), {}
    base = decoded(plain)
    torch.testing.assert_close(decoded(fused), base, atol=1e-4, rtol=1e-4)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and (".layers." in name or name == "lm_head.weight"):
            out, size = weight.shape
            pairs[name] = 0.1 * torch.randn(3, size, generator=draw), 0.1 * torch.randn(out, 3, generator=draw)
    adapter = Adapter(model)
    for scaling in (1.0, 1.7):
        adapter.use(pairs, scaling)
        fused.refresh()
        found = decoded(fused)
        assert (found - base).abs().max() > 0.01
        torch.testing.assert_close(found, decoded(plain), atol=1e-4, rtol=1e-4)
    adapter.use({}, 1.0)
    fused.refresh()
    torch.testing.assert_close(decoded(fused), base, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        for weight in lender.parameters():
            weight.mul_(1.1)
    fused.refresh()
    torch.testing.assert_close(decoded(fused), decoded(plain), atol=1e-4, rtol=1e-4)
    assert (decoded(plain) - base).abs().max() > 0.01
    assert {name: tensor.data_ptr() for name, tensor in named(model).items()} == places


def test_after_an_error_in_a_layer_its_own_weights_are_back(tiny_models: Callable[..., Path]) -> None:
    folder = str(tiny_models("qwen3_moe"))
    model = model_around(named(load_model(folder, "float32", "cpu", False)), folder, "float32", "cpu", False)
    experts = next(module for name, module in model.named_modules() if name.endswith("experts"))
    weight, where = experts.gate_up_proj, next(n for n, w in model.named_parameters() if w is experts.gate_up_proj)
    many, out, size = weight.shape
    Adapter(model).use({where: (torch.ones(many, 1, size), torch.ones(many, out, 1))}, 1.0)
    with pytest.raises(AttributeError):
        experts(None, None, None)
    assert experts.gate_up_proj is weight


def test_tensors_of_another_model_or_device_are_refused(tiny_models: Callable[..., Path]) -> None:
    folder, other = str(tiny_models("qwen3")), str(tiny_models("llama"))
    tensors = named(load_model(folder, "float32", "cpu", False))
    with pytest.raises(WhetError, match=r"not those of LlamaForCausalLM .* differ in .*k_norm"):
        model_around(tensors, other, "float32", "cpu", False)
    with pytest.raises(WhetError, match=r"differ in model\.norm\.weight"):
        model_around({**tensors, "model.norm.weight": torch.ones(3)}, folder, "float32", "cpu", False)
    with pytest.raises(ConfigError, match=r"weights are on cpu, the generator's device is cuda:0"):
        model_around(tensors, folder, "float32", "cuda:0", False)
