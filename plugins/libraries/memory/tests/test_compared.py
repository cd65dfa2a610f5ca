"""What was predicted beside what was measured, from the files of a run."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from whet.errors import WhetError
from whet.run.run_folder import RunFolder
from whet_memory.cli import memory
from whet_memory.compared import compare, compared

GIB = 2**30
PEAKS = {
    "backend": {"train": {"device": 3 * GIB, "host": 0}, "idle": {"device": 2 * GIB, "host": 0}, "source": "trace"},
    "critic": {"train": {"device": GIB, "host": 0}, "idle": {"device": GIB, "host": 0}, "source": "formulas"},
}


def plan(*groups: str, turns: list[list[str]] | None = None) -> dict[str, Any]:
    roles = [
        {"role": role, "processes": group, "devices": ["cpu"]}
        for role, group in zip(("backend", "critic"), groups, strict=True)
    ]
    return {"roles": roles, "peaks": PEAKS, "turns": turns or []}


ROWS = [{"step": 1, "memory/backend.train": 2.0}, {"step": 2, "memory/backend.train": 3.5, "memory/critic.train": 1.0}]


@pytest.mark.parametrize(
    ("planned", "predicted"),
    [
        (plan("a", "b"), {"backend": 3 * GIB, "critic": GIB}),
        (plan("a", "a"), {"backend": 4 * GIB, "critic": 3 * GIB}),
        (plan("a", "a", turns=[["backend"], ["critic"]]), {"backend": 3 * GIB, "critic": GIB}),
        ({}, {"backend": None, "critic": None}),
    ],
)
def test_the_largest_peak_stands_beside_the_prediction_for_its_process(planned, predicted) -> None:
    found = compare(planned, ROWS)
    assert {one.role: one.predicted for one in found} == predicted
    assert {one.role: one.measured for one in found} == {"backend": 3.5 * GIB, "critic": GIB}


@pytest.mark.parametrize(
    "odd", [None, [], {"peaks": 3}, {"peaks": {"backend": {"train": []}}, "roles": [1], "turns": 2}]
)
def test_files_of_another_form_are_passed_over(odd) -> None:
    rows = [{"memory/backend.train": "x"}, {"memory/backend.other": 1.0}, {"memory/backend.train": float("nan")}]
    assert compare(odd, rows) == []
    assert [one.predicted for one in compare(odd, ROWS)] == [None, None]


def test_a_folder_that_holds_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(WhetError, match="holds no run: there is no metrics"):
        compared(RunFolder(tmp_path))
    (tmp_path / "config.yaml").touch()
    assert compared(RunFolder(tmp_path)) == []


def test_the_command_prints_both(tmp_path) -> None:
    run = RunFolder(tmp_path)
    run.write_json("plan.json", plan("a", "b"))
    run.append("metrics.jsonl", json.loads(json.dumps(ROWS)))
    done = CliRunner().invoke(memory, [str(tmp_path)])
    assert done.exit_code == 0, done.output
    head, *rows = done.output.splitlines()
    assert head.split("  ")[0] == "peak of memory"
    assert rows[-2].startswith("formulas assume full passes")
    assert rows[-1].startswith("on a CPU")
    assert rows[0].split() == ["backend.train", "3.0", "GiB", "3.5", "GiB", "+512", "MiB", "(trace)"]
