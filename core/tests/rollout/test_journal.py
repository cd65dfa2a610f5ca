"""The checker finds nothing in a run whose groups ended once each, and names whatever is wrong with another."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.rollout.journal import ranges
from whet.run.run_folder import RunFolder
from whet_testing.journal import check, indices


@given(st.lists(st.integers(0, 40), unique=True))
def test_numbers_written_compactly_are_read_back(numbers: list[int]) -> None:
    assert indices(ranges(numbers)) == sorted(numbers)


def test_runs_of_numbers_are_written_as_ranges() -> None:
    assert ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3,7,9-10"
    assert ranges([]) == ""


def rollouts(folder: Path, step: int, groups: list[int], version: int | None = None) -> None:
    made = step - 1 if version is None else version
    rows = [{"group": g, "sample": s, "versions": [made, made]} for g in groups for s in range(2)]
    (folder / f"rollouts/step-{step:06d}.jsonl").unlink(missing_ok=True)
    RunFolder(folder).append(f"rollouts/step-{step:06d}.jsonl", rows)


def state(folder: Path, step: int, count: int, beyond: list[int]) -> None:
    file = folder / f"checkpoints/step-{step:06d}/state.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"rollouts": {"groups": {"a": count - 1, "b": 1}, "beyond": beyond}}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three steps of two groups, killed after step 2 and resumed after step 1; 3 was overtaken, 1 filtered."""
    run = RunFolder(tmp_path)
    (tmp_path / "config.yaml").write_text("rollout: {max_staleness: 2}\n")
    run.journal("opened", after_step=0)
    run.journal("step", step=1, trained="0,2", filtered="1")
    run.journal("step", step=2, trained="3-4")
    run.rewind(1)
    run.journal("opened", after_step=1)
    run.journal("step", step=2, trained="4-5")
    run.journal("step", step=3, trained="3,7", dropped="6")
    rollouts(tmp_path, 1, [0, 2])
    rollouts(tmp_path, 2, [4, 5])
    rollouts(tmp_path, 3, [3, 7], version=0)
    state(tmp_path, 2, 3, [4, 5])
    state(tmp_path, 3, 8, [])
    return tmp_path


def test_a_sound_run_has_no_problems(folder: Path) -> None:
    assert check(folder) == []


def again(folder: Path, **entry: object) -> None:
    RunFolder(folder).journal("step", **entry)


def forget(folder: Path, text: str) -> None:
    journal = folder / "journal.jsonl"
    kept = [line for line in journal.read_text().splitlines(True) if text not in line]
    journal.write_text("".join(kept))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda f: (again(f, step=4, trained="4,8"), rollouts(f, 4, [4, 8])),
         "group 4 ended more than once: trained at step 2, trained at step 4"),
        (lambda f: (again(f, step=4, trained="8-9", filtered="1"), rollouts(f, 4, [8, 9])), "group 1 ended more than"),
        (lambda f: forget(f, '"step": 2'), "lacks the steps 2"),
        (lambda f: again(f, step=3, dropped="6"), "step 3 trained no group"),
        (lambda f: rollouts(f, 2, [4]), "has the groups 4, the journal says that step 2 trained 4-5"),
        (lambda f: rollouts(f, 2, [4, 5, 9]), "has the groups 4-5,9, the journal says"),
        (lambda f: (f / "rollouts/step-000001.jsonl").unlink(), "has the groups none, .* trained 0,2"),
        (lambda f: rollouts(f, 2, [4, 4, 5]), "has sample 0 of group 4 2 times"),
        (lambda f: rollouts(f, 3, [3, 7], version=-1), "made by versions -1 to -1, trained on by version 2"),
        (lambda f: rollouts(f, 2, [4, 5], version=2), "made by versions 2 to 2, trained on by version 1"),
        (lambda f: state(f, 2, 3, [5]), "step 2 and the journal differ: only the first .* none, only the second 4"),
        (lambda f: state(f, 3, 9, []), "step 3 and the journal differ: only the first counts as ended 8"),
        (lambda f: RunFolder(f).append("rollouts/step-000002.jsonl", [{"group": 5, "sample": 2, "versions": [1, 1]}]),
         "groups have different numbers of episodes: 2, 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(folder: Path, harm: Callable[[Path], None], told: str) -> None:
    import re

    harm(folder)
    problems = check(folder)
    assert any(re.search(told, problem) for problem in problems), problems


def test_a_group_that_never_ends_is_lost_once_its_time_is_over(folder: Path) -> None:
    run = RunFolder(folder)
    for step in (4, 5):
        run.journal("step", step=step, trained=ranges([2 * step + 1, 2 * step + 2]))  # 8 is missing
        rollouts(folder, step, [2 * step + 1, 2 * step + 2])
    assert check(folder) == []
    run.journal("step", step=6, trained="13-14")
    rollouts(folder, 6, [13, 14])
    assert check(folder) == ["group 8 was lost: one after it ended with step 4, and it never did"]
    run.rewind(5)
    assert check(folder) == []


def test_the_last_step_of_a_killed_run_may_be_half_written(folder: Path) -> None:
    run = RunFolder(folder)
    run.journal("step", step=4, trained="8-9")
    assert check(folder) == []
    run.append("rollouts/step-000004.jsonl", [{"group": 8, "sample": 0, "versions": [3, 3]}])
    assert check(folder) == []
    run.append("rollouts/step-000004.jsonl", [{"group": 10, "sample": 0, "versions": [3, 3]}])
    assert any("has the groups 8,10, the journal says" in problem for problem in check(folder))
