"""Adapters in PEFT's files: which are read, and which are refused."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.component import AdapterInfo
from whet.errors import WhetError
from whet_weights.adapter import CONFIG, peft_config, read_peft, write_peft

TENSORS = {
    "base_model.model.layer.lora_A.weight": torch.ones(2, 3),
    "base_model.model.layer.lora_B.weight": torch.ones(4, 2),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of an adapter of one linear layer."""
    write_peft(tmp_path, TENSORS, peft_config(AdapterInfo(2, 4.0), "base", ["layer"]))
    return tmp_path


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_base_as_it_is_are_read(folder: Path, start: Any) -> None:
    change(folder, init_lora_weights=start)
    _, tensors = read_peft(folder)
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "corda", "olora", "OLoRA", "lora_ga"])
def test_starts_that_change_the_base_are_refused_with_both_ways_out(folder: Path, start: str) -> None:
    change(folder, init_lora_weights=start)
    ways = r"path_initial_model_for_weight_conversion=.*unload\(\), set model.path"
    with pytest.raises(WhetError, match=f"{start}.*{ways}"):
        read_peft(folder)


def test_a_quantized_base_has_no_conversion(folder: Path) -> None:
    change(folder, init_lora_weights="loftq")
    with pytest.raises(WhetError, match="loftq") as refused:
        read_peft(folder)
    assert "conversion" not in str(refused.value)


@pytest.mark.parametrize("key", ["use_dora", "kasa_config", "arrow_config", "use_bdlora"])
def test_an_adapter_that_is_more_than_two_matrices_is_refused(folder: Path, key: str) -> None:
    change(folder, **{key: {"some": 1}})
    with pytest.raises(WhetError, match=f"no plain LoRA adapter: {key}"):
        read_peft(folder)


def test_dropout_of_an_adapter_is_told_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_peft(folder)
        assert not caplog.records
        change(folder, lora_dropout=0.1)
        read_peft(folder)
    assert "lora_dropout 0.1" in caplog.text


@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_an_alpha_that_is_no_finite_number_is_refused(folder: Path, alpha: float) -> None:
    change(folder, lora_alpha=alpha)
    with pytest.raises(WhetError, match=r"lora_alpha is (nan|inf), wanted a finite number"):
        read_peft(folder)
