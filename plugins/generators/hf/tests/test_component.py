"""The plugin registers without torch, and its facts are true."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whet.data.model_info import read_model
from whet_hf.checks import checked
from whet_hf.config import HfConfig
from whet_hf.facts import facts
from whet_start.small_models import make_model


def test_hooks_and_facts_import_no_torch() -> None:
    code = (
        "import sys, whet_hf.hooks, whet_hf.facts\n"
        "assert [c.name for c in whet_hf.hooks.whet_generators()] == ['hf']\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules), 'imported early'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_counts_weights_and_cache(tmp_path: Path, tiny_tokenizer: object) -> None:
    model = read_model(make_model(tmp_path, tiny_tokenizer), "bfloat16")

    def held(config: HfConfig) -> list[int]:
        memory = facts(config, model).memory
        return [term.bytes for term in memory(1, False)] if memory else []

    assert held(HfConfig(cache_gib=2**-10)) == [2 * model.parameters, 2**20]
    assert held(HfConfig(cache_gib=2**-10, dtype="float32")) == [4 * model.parameters, 2**20]
    # Keys and values of 256 sequences of 256 positions: 2 layers, 2 heads of 16, four bytes each.
    assert held(HfConfig(cache_gib=64.0)) == [2 * model.parameters, 256 * 256 * (2 * 2 * 2 * 16 * 4)]
    assert facts(HfConfig(), model).transports == ("shared", "broadcast", "shared-memory", "disk")


SHARED = HfConfig(weights="shared")


def test_shared_weights_take_no_memory_and_no_way_but_in_place(tiny_model_folder: Path) -> None:
    found = facts(SHARED, read_model(tiny_model_folder, "float32"))
    assert (found.transports, found.in_place, found.on_weight_update) == (("in-place",), "transformers", ("drain",))
    assert found.memory is not None
    assert {term.what for term in found.memory(1, False)} == {"keys and values"}
    assert found.problems is not None
    assert not list(found.problems(1))


def test_shared_weights_of_several_ranks_or_of_another_dtype_are_refused(tiny_model_folder: Path) -> None:
    model = read_model(tiny_model_folder, "float32")
    for config, ranks, path, words in (
        (SHARED, 2, "weights", "has 2 ranks; a backend on several ranks splits its weights: give both one rank"),
        (HfConfig(weights="shared", dtype="bfloat16"), 1, "dtype", "it is that of the trainer, float32; leave it out"),
    ):
        found = facts(config, model)
        assert found.problems is not None
        assert words in {one.path: one.message for one in found.problems(ranks)}[path]
    assert facts(HfConfig(dtype="bfloat16"), model).problems is None


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"ranks": {"backend": 2}}, "generator.weights", "the backend has 2 ranks, which split its weights"),
        ({"gpus": {"backend": 4}}, "generator.weights", "the backend has 4 ranks"),
        ({"staleness": 1}, "generator.weights", "weights change under requests; set rollout.max_staleness: 0"),
        ({"content": "merged"}, "weight_sync.content", "cannot be merged into weights that are the trainer's"),
        ({"serve": True}, "generator.weights", "that endpoint.serve answers at any time; train an adapter"),
    ],
    ids=str,
)
def test_what_shared_weights_do_not_go_with_is_refused_with_what_to_change(
    changes: dict[str, Any], path: str, words: str
) -> None:
    def problems(weights: Any, lora: Any = None) -> dict[str, str]:
        generator = HfConfig(weights=weights)
        made: Any = SimpleNamespace(
            roles={},
            generator=SimpleNamespace(config=generator),
            cluster=SimpleNamespace(ranks=changes.get("ranks", {}), gpus=changes.get("gpus", {})),
            rollout=SimpleNamespace(max_staleness=changes.get("staleness", 0)),
            weight_sync=SimpleNamespace(content=changes.get("content", "auto")),
            endpoint=SimpleNamespace(serve=changes.get("serve", False)),
            backend=SimpleNamespace(config=SimpleNamespace(lora=lora)),
        )
        return {problem.path: problem.message for problem in checked(made)}

    assert words in problems("shared")[path]
    assert "set generator.weights: own" in problems("shared")[path]
    assert not problems("own")
    assert bool(problems("shared", lora={"rank": 8})) == ("serve" not in changes), "a base that is not trained stays"


def test_a_further_generator_shares_no_weights() -> None:
    roles = {"judge": SimpleNamespace(component=SimpleNamespace(config=SHARED))}
    found = list(checked(SimpleNamespace(roles=roles, generator=None)))  # type: ignore[arg-type]  # what is read of it
    assert [one.path for one in found] == ["roles.judge.weights"]


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"cache_gib": 0.0}])
def test_settings_that_leave_no_room_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HfConfig(**wrong)  # type: ignore[arg-type]
