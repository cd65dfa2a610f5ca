"""Only a whole model is taken, by name and shape."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from whet.errors import WeightSyncError
from whet_weights.whole import Shape, check_whole, failure_among, stored_shapes

STORED: dict[str, Shape] = {
    "model.embed_tokens.weight": (384, 64),
    "model.layers.0.self_attn.q_proj.weight": (128, 64),
    "model.layers.0.self_attn.k_proj.weight": (64, 64),
    "model.layers.0.self_attn.v_proj.weight": (64, 64),
    "model.norm.weight": (64,),
}


def test_all_of_it_is_taken() -> None:
    check_whole(STORED.items(), STORED, tied=True)
    check_whole([*STORED.items(), ("lm_head.weight", (384, 64))], STORED, tied=True)
    check_whole(STORED.items(), {**STORED, "lm_head.weight": (384, 64)}, tied=True)
    check_whole(STORED.items(), {**STORED, "model.rotary_emb.inv_freq": (16,)}, tied=True)


def sent(**changes: Any) -> list[tuple[str, Shape]]:
    names = {name.split(".")[-2]: name for name in STORED}
    found = {name: changes.get(short, STORED[name]) for short, name in names.items()}
    return [(name, shape) for name, shape in found.items() if shape is not None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_proj": None}, r"1 parameters were not sent: model\.layers\.0\.self_attn\.k_proj\.weight"),
        ({"k_proj": None, "v_proj": None, "norm": None}, "3 parameters were not sent: "),
        ({"q_proj": (64, 128)}, r"q_proj\.weight was sent with shape \(64, 128\), wanted \(128, 64\)"),
    ],
)
def test_a_part_of_it_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        check_whole(sent(**changes), STORED, tied=True)


def test_the_output_layer_alone_is_refused_also_where_it_is_the_embedding() -> None:
    with pytest.raises(WeightSyncError, match="5 parameters were not sent"):
        check_whole([("lm_head.weight", (384, 64))], STORED, tied=True)
    without_embedding = [(name, shape) for name, shape in STORED.items() if "embed" not in name]
    with pytest.raises(WeightSyncError, match=r"1 parameters were not sent: model\.embed_tokens\.weight"):
        check_whole([*without_embedding, ("lm_head.weight", (384, 64))], STORED, tied=True)


def test_an_untied_output_layer_must_come() -> None:
    with pytest.raises(WeightSyncError, match=r"1 parameters were not sent: lm_head\.weight"):
        check_whole(STORED.items(), {**STORED, "lm_head.weight": (384, 64)}, tied=False)


def test_what_the_model_has_not_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"the model folder has no model\.layers\.1\.x, but that was sent"):
        check_whole([*STORED.items(), ("model.layers.1.x", (1,))], STORED, tied=True)
    with pytest.raises(WeightSyncError, match="was sent twice"):
        check_whole([*STORED.items(), *STORED.items()], STORED, tied=True)


def test_names_and_shapes_are_read_from_the_files(tiny_model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    assert stored_shapes(tiny_model_folder) == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("reports", "found"),
    [
        ([("", False), ("", False)], ("", False)),
        ([("it was cut", False), ("it was cut", False)], ("it was cut", False)),
        ([("", False), ("it was cut", False)], ("it was cut", True)),
        ([("it was cut", True)], ("it was cut", True)),
    ],
    ids=["taken", "refused by all", "taken by some", "half taken"],
)
def test_one_process_that_refuses_is_a_failure_and_one_that_does_not_then_a_mixture(
    reports: list[tuple[str, bool]], found: tuple[str, bool]
) -> None:
    assert failure_among([{"failure": failure, "spoilt": spoilt} for failure, spoilt in reports]) == found


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_that_a_folder_has_a_second_time_under_other_names_are_not_wanted(
    tiny_model_folder: Path, tmp_path: Path, sharded: bool
) -> None:
    for file in tiny_model_folder.iterdir():
        shutil.copy(file, tmp_path / file.name)
    wanted = stored_shapes(tiny_model_folder)
    if sharded:
        (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(wanted, "model-00001-of-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, tmp_path / "consolidated.safetensors")
    assert stored_shapes(tmp_path) == wanted
