"""A run whose environment is played in worker processes: the same numbers, and losses that the run survives."""

import json
import shutil
from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.plan.prepare import prepare
from whet.run.compose import run

HERE = Path(__file__).parent
APART = HERE.parent / "plugins" / "tools" / "envworkers" / "tests" / "apart.py"


def metrics(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def episodes(folder):
    rows = [
        json.loads(line) for file in sorted((folder / "run" / "rollouts").glob("*.jsonl")) for line in file.open()
    ]  # fmt: skip
    return [(row["task"], row["sample"], row["messages"], row["rewards"], row["reward"]) for row in rows]


def test_a_run_in_processes_has_the_numbers_of_a_run_on_the_driver(small_run, tmp_path):
    found = []
    for name, given in (("driver", {}), ("processes", {"worker": {"processes": 2}})):
        folder = tmp_path / name
        folder.mkdir()
        environments = [{"use": "even", **given}]
        evaluation = {"environments": [{"use": "even", **given, "split": "train", "limit": 4}]}
        config = small_run(
            folder, environments=environments, evaluation=evaluation,
            cluster={"workers": "inline", "threads": {"backend": 1, "generator": 1}},
        )  # fmt: skip
        assert run(config, ["run.steps=2"]).finished
        found.append(folder)
    assert episodes(found[0]) == episodes(found[1])
    assert len(episodes(found[0])) == 2 * 4 * 2
    for one, other in zip(*map(metrics, found), strict=True):
        assert one.keys() == other.keys()
        names = ["reward/mean", "evaluation/even/reward", "loss"]
        assert [one.get(name) for name in names] == pytest.approx([other.get(name) for name in names])
    assert metrics(found[0])[-1]["evaluation/even/reward"] > 0


def test_processes_that_die_are_replaced_and_counted_and_the_run_goes_on(small_run, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    config = small_run(
        tmp_path, environments=[{"use": "apart", "worker": {}, "folder": str(marks), "kinds": ["plain", "dies"]}],
        cluster={"workers": "inline", "threads": {"backend": 1, "generator": 1}}, plugins=[str(APART)],
        algorithm={"use": "grpo", "prompts_per_step": 6, "group_size": 2},
    )  # fmt: skip
    assert run(config, ["run.steps=2"]).finished
    assert list(marks.iterdir()), "no episode made its process die"
    assert sum(row.get("episodes/retried", 0) for row in metrics(tmp_path)) > 0


def test_a_python_without_the_environment_is_named_before_a_run(small_run, tmp_path):
    bare = tmp_path / "bare"
    (bare / "bin").mkdir(parents=True)
    base = Path(shutil.which("python3.11") or "/usr/bin/python3").resolve()
    (bare / "bin" / "python").symlink_to(base)
    config = small_run(tmp_path, environments=[{"use": "even", "worker": {"python": str(bare)}}])
    with pytest.raises(ConfigError, match=r"environments\.0\.worker\.python: .*has no whet"):
        prepare(config)
    config = small_run(tmp_path, environments=[{"use": "even", "worker": {"python": "nowhere"}}])
    with pytest.raises(ConfigError, match=r"environments\.0\.worker\.python: .*no such environment"):
        prepare(config)


def test_an_environment_is_played_in_another_python(small_run, tmp_path, layered_python):
    config = small_run(
        tmp_path, environments=[{"use": "even", "worker": {"python": str(layered_python / "python")}}],
        cluster={"workers": "inline", "threads": {"backend": 1, "generator": 1}},
    )  # fmt: skip
    assert run(config, ["run.steps=1"]).finished
