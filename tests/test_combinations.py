"""What the facts say fits does run: two steps of combinations in which every pair of parts occurs."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from whet.component import resolve
from whet.config.structure import structure
from whet.plugins.registry import Registry, load_plugins
from whet.run.compose import run
from whet_testing.combinations import SLOTS, Combination, combinations, covering
from whet_testing.contracts.algorithm import RECORDS
from whet_testing.contracts.component import MODEL

ROOT = Path(__file__).parents[1]
OWN = Path(__file__).parent / "own_parts.py"
SMALL = {
    "prompts_per_step": 2, "group_size": 4, "batch_size": 4, "pairs_per_step": 4,
}  # fmt: skip


@functools.cache
def page() -> Any:
    """Load what writes the page, for its settings are those of this test."""
    spec = importlib.util.spec_from_file_location("combinations", ROOT / "docs" / "combinations.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@functools.cache
def registry() -> Registry:
    """All that is installed, and parts of a single file beside."""
    made = load_plugins()
    made.load_file(OWN)
    return made


@functools.cache
def fitting() -> list[Combination]:
    return [
        one for one in combinations(registry())
        if critic_fits(one.algorithm, one.value_loss) and fits(attrs.evolve(one, filters="")) and fits(one)
    ]  # fmt: skip


@functools.cache
def critic_fits(algorithm: str, value_loss: str) -> bool:
    """Ask this first: the others need not be asked with each of a critic's losses that fits nowhere."""
    return not value_loss or fits(Combination(algorithm, value_loss=value_loss))


@functools.cache
def fits(one: Combination) -> bool:
    return not page().problems_of(one, registry())


def named(one: Combination) -> str:
    return "+".join(name for _, name in one.parts() if name)


def records_of(one: Combination, folder: Path) -> dict[str, Any]:
    """Write records of the format that an algorithm reads, and give the sections that feed it."""
    component = registry().find("algorithms", one.algorithm).component
    config = structure(
        {key: value for key, value in one.section().items() if key != "use"}, component.config, registry()
    )
    facts = resolve(component.facts)(config, MODEL)
    if "rollouts" in facts.inputs:
        return {"environments": [{"use": "even"}], "generator": {"use": "hf"}}
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[facts.data_format]))
    return {"data": {"train": [{"path": str(file)}]}}


@pytest.mark.parametrize("one", covering(fitting()), ids=named)
def test_what_fits_takes_two_steps(one: Combination, tmp_path: Path, tiny_model_folder: Path) -> None:
    component = registry().find("algorithms", one.algorithm).component
    keys = {key: value for key, value in SMALL.items() if key in component.config.__annotations__}
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 2, "export": False},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {**one.section(), **keys},
        "backend": {"use": "fsdp2", "reference": True, "teacher": str(tiny_model_folder)},
        "rollout": {"max_tokens": 4},
        "cluster": {"workers": "inline", "threads": {"backend": 1}},
        "plugins": [str(Path(__file__).parent / "even_digits.py"), str(OWN)],
        **page().further(one, registry()),
        **records_of(one, tmp_path),
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
    assert run(tmp_path / "it.yaml").finished
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 2
    assert all("loss" in row and "nonfinite_steps" not in row for row in steps)


def test_every_pair_that_fits_is_run() -> None:
    wanted = set().union(*(one.pairs() for one in fitting()))
    assert wanted == set().union(*(one.pairs() for one in covering(fitting())))
    assert len(covering(fitting())) < len(fitting())


def test_every_loss_advantage_and_filter_fits_something() -> None:
    used = {(SLOTS[slot], name) for one in fitting() for slot, name in one.parts() if slot in SLOTS}
    for kind in set(SLOTS.values()):
        assert {(kind, name) for name in registry().offers(kind)} <= used


def test_parts_of_a_single_file_are_run_with_those_of_others() -> None:
    run_with = {name: set() for name in ("own-pg", "own-value", "own-advantages", "own-filter")}
    for one in covering(fitting()):
        names = {name for _, name in one.parts() if name}
        for own in names & run_with.keys():
            run_with[own] |= names - {own}
    assert {"grpo", "ppo", "group-mean", "unequal-rewards", "value-clip"} <= run_with["own-pg"]
    assert {"ppo", "ppo-clip", "clipped-pg", "unequal-rewards"} <= run_with["own-value"]
    assert {"grpo", "clipped-pg", "unequal-rewards", "own-pg"} <= run_with["own-advantages"]
    assert {"grpo", "ppo", "group-mean", "value-clip"} <= run_with["own-filter"]


def test_the_page_says_why_something_does_not_fit() -> None:
    text = (ROOT / "docs" / "reference" / "combinations.md").read_text()
    assert "algorithm.loss: wants one advantage for each sequence" in text
    assert "reads no 'advantages', so nothing that grpo finds out would reach it" in text
