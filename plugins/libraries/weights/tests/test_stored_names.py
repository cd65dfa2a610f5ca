"""Tensors in memory and in the folder of a model are the same numbers, whichever way they are cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig

from whet_weights.stored_names import StoredNames

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 32,
}  # fmt: skip


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3", "llama"])
def test_names_and_values_are_those_of_the_folder(tiny_models: Any, family: str, tied: bool) -> None:
    folder = tiny_models(family, tied=tied)
    model, stored = load(folder), load_file(folder / "model.safetensors")
    names = StoredNames(model)
    found = dict(names.stored(model.named_parameters()))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    assert bool(names) == (family in ("qwen3_moe", "mixtral"))
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert all(tensor.untyped_storage().data_ptr() in held for tensor in found.values()), "one is a copy"


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**SMALL, num_local_experts=3),
        DeepseekV3Config(
            **SMALL, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
            v_head_dim=8,
        ),
        GptOssConfig(**SMALL, head_dim=8, num_local_experts=3, num_experts_per_tok=2),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_stored_tensors_are_written_back_into_their_places(tmp_path: Path, config: Any) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, stored = load(tmp_path), load_file(tmp_path / "model.safetensors")
    names = StoredNames(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert dict(names.stored(model.state_dict().items())).keys() >= stored.keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            pieces = names.pieces(name)
            parameter.zero_()
            for piece in pieces:
                piece.write(parameter, stored[piece.name])
            if pieces:
                assert torch.equal(parameter, before[name])


def test_a_folder_with_the_names_of_memory_keeps_them(tiny_models: Any, tmp_path: Path) -> None:
    source = tiny_models("qwen3_moe")
    held = {name: tensor.contiguous() for name, tensor in load(source).state_dict().items() if "lm_head" not in name}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    assert dict(StoredNames(model).stored(model.named_parameters())).keys() == held.keys()


def test_elements_that_are_no_view_are_copied_both_ways() -> None:
    from whet_weights.stored_names import _piece

    where = torch.tensor([[0, 3], [1, 2]])
    piece = _piece("odd", where)
    assert piece.stride is None
    tensor, value = torch.arange(6.0), torch.tensor([[10.0, 13.0], [11.0, 12.0]])
    assert piece.read(tensor).tolist() == [[0, 3], [1, 2]]
    piece.write(tensor, value)
    assert tensor.tolist() == [10, 11, 12, 13, 4, 5]
    assert torch.equal(piece.read(tensor), value)
