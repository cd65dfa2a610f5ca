"""What is written for a foreign engine is refused where it is set elsewhere, forbidden or unknown to the engine."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whet.component import Package, Problem
from whet.data.model_info import ModelInfo
from whet.errors import WhetError
from whet_generation.external_engine import ForeignEngine, split_problems, visible_gpus

KNOWN = {"dtype", "whistle", "block_size", "max_num_batched_tokens"}


def engine(module: str = "steam_that_nobody_has", **changes: Any) -> ForeignEngine:
    given = {
        "arguments_in": ("fields/*.py",), "listed_by": "`steam --help`", "ours": {"dtype": "generator.dtype"},
        "fixed": {"whistle": "somebody listens to it"}, **changes,
    }  # fmt: skip
    return ForeignEngine(Package("Steam", module, ("steam",), "light a fire"), **given)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install an engine, and give its module."""
    fields = tmp_path / "steam_of_this_test" / "fields"
    fields.mkdir(parents=True)
    (fields.parent / "__init__.py").write_text("raise ImportError('it must not be imported')")
    (fields / "of_boiler.py").write_text("class Boiler:\n    block_size: int = 1\n    limit = 3\n")
    (fields / "of_rest.py").write_text("class Rest:\n    dtype: str\n    def stop(self): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    return fields.parent.name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_batch_tokens", "is no argument of the installed Steam (did you mean 'max_num_batched_tokens'?)"),
        ("qqq", "is no argument of the installed Steam (`steam --help` lists them)"),
        ("dtype", "is set by `generator.dtype`; write it there"),
        ("whistle", "cannot be changed: somebody listens to it"),
    ],
)
def test_an_argument_that_cannot_be_passed_on_is_named(name: str, message: str) -> None:
    assert list(engine().wrong({name: 1, "block_size": 16}, KNOWN)) == [(name, message)]


@pytest.mark.parametrize(
    ("kv_heads", "able"),
    [(4, {1, 2, 4, 28}), (28, {1, 2, 4, 7, 14, 28}), (0, {*range(1, 30)}), (1, {1, 2, 4, 7, 14, 28})],
)
def test_heads_that_processes_cannot_share_are_refused(kv_heads: int, able: set[int]) -> None:
    shape = {"num_attention_heads": 28, "num_key_value_heads": kv_heads} if kv_heads else {}

    def wrong(processes: int) -> list[Problem]:
        config: Any = SimpleNamespace(tensor_parallel=processes)
        return list(split_problems(config, ModelInfo("model", shape), 1))

    assert {processes for processes in range(1, 30) if not wrong(processes)} == able
    if kv_heads == 4:
        (problem,) = wrong(8)
        assert str(problem).startswith(
            "tensor_parallel: is 8, and the model has 28 attention heads and 4 key/value heads"
        )
        assert problem.message.endswith(": 1, 2, 4, 28")


def test_where_the_engine_is_not_here_any_other_argument_may_be_right() -> None:
    assert engine().known() == frozenset()
    assert list(engine().wrong({"qqq": 1}, frozenset())) == []


def test_arguments_are_read_from_the_source_of_the_engine_which_is_not_imported(installed: str) -> None:
    assert engine(installed).known() == {"block_size", "dtype"}
    assert engine(installed, argument_classes=("Boiler",)).known() == {"block_size"}


def test_a_worker_refuses_to_begin_without_the_engine_or_with_arguments_that_it_does_not_have(installed: str) -> None:
    with pytest.raises(WhetError, match=f"^{sys.executable} has no Steam; light a fire$"):
        engine().refuse({})
    with pytest.raises(WhetError, match=r"^generator\.engine\.blok_size is no argument .* \(did you mean 'block_size'"):
        engine(installed).refuse({"blok_size": 1})
    engine(installed).refuse({"block_size": 1})


@pytest.mark.parametrize(
    ("device", "visible", "wanted"),
    [
        ("cpu", "4,5", None),
        ("cuda:0,1", "4,5", "4,5"),
        ("cuda:1", "4,5", "5"),
        ("cuda:2,3", "", "2,3"),
        ("cuda:0", "GPU-a,GPU-b", "GPU-a"),
    ],
)
def test_an_engine_s_processes_see_the_gpus_of_its_rank_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str, wanted: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(device) == ({} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted})
