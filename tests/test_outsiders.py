"""Each file of `examples/plugins` keeps the rules of its kind, and takes part in two steps of a real run."""

import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest

import whet
from whet.component import import_file
from whet.data.files import read_metrics, read_rows
from whet_testing.contracts.advantages import AdvantagesContract
from whet_testing.contracts.environment import EnvironmentContract
from whet_testing.contracts.filter import FilterContract, group_of
from whet_testing.contracts.hooks import HooksContract
from whet_testing.contracts.logger import LoggerContract
from whet_testing.contracts.loss import LossContract

PLUGINS = Path(__file__).resolve().parents[1] / "examples" / "plugins"


def plugin(name):
    return import_file(PLUGINS / f"{name}.py")


class TestTopr(LossContract):
    def make(self):
        return plugin("topr").Topr(plugin("topr").ToprConfig())


class TestNarrowingClip(LossContract):
    def make(self):
        return plugin("narrowing_clip").NarrowingClip(plugin("narrowing_clip").NarrowingClipConfig())


class TestRunningScale(AdvantagesContract):
    moving = True

    def make(self):
        return plugin("running_scale").RunningScale(plugin("running_scale").RunningScaleConfig())


class TestRetiredTasks(FilterContract):
    def make(self):
        return plugin("retired_tasks").RetiredTasks(plugin("retired_tasks").RetiredTasksConfig())


class TestSqlite(LoggerContract):
    def make(self, run):
        return plugin("sqlite_logger").SqliteLogger(plugin("sqlite_logger").SqliteConfig(), run)

    def read(self, folder):
        rows = {}
        with sqlite3.connect(folder / "run.sqlite") as database:
            for step, name, value in database.execute("SELECT * FROM metrics ORDER BY rowid"):
                rows.setdefault(step, {})[name] = value
        return list(rows.items())


class TestPlateau(HooksContract):
    def make(self, run):
        return plugin("plateau").Plateau(plugin("plateau").PlateauConfig(), run)


@pytest.fixture
def train(small_run, tmp_path):
    """Train for two steps with plugins of the folder in this process, and return the run folder."""

    def run(*names, **sections):
        files = [str(PLUGINS / f"{name}.py") for name in names]
        settings = {
            "run": {"folder": str(tmp_path / "run"), "steps": 2, "export": False},
            "cluster": {"workers": "inline"},
            "plugins": [*files, str(Path(__file__).parent / "even_digits.py")],
            **sections,
        }
        with whet.open(small_run(tmp_path, **settings)) as parts:
            parts.hooks.whet_run(algorithm=parts.algorithm, parts=parts)
        return tmp_path / "run"

    return run


def column(run, name):
    return [row[name] for _, row in read_metrics(run / "metrics.jsonl") if name in row]


@pytest.mark.parametrize(
    ("name", "key", "component", "metric"),
    [
        ("topr", "loss", "topr", "weight/bad"),
        ("narrowing_clip", "loss", {"use": "narrowing-clip", "first": 0.5}, "clipped"),
        ("running_scale", "advantages", "running-scale", "advantages/std"),
        ("retired_tasks", "filters", [{"use": "retired-tasks", "solved_at": 0.0, "times": 1}], "groups/filtered"),
    ],
)
def test_grpo_trains_with_a_part_of_ones_own(train, name, key, component, metric):
    algorithm = {"use": "grpo", "prompts_per_step": 4, "group_size": 2, key: component}
    assert len(column(train(name, algorithm=algorithm), metric)) == 2


def test_raft_learns_the_best_response_of_each_prompt(train):
    run = train("raft", algorithm={"use": "raft", "prompts_per_step": 4, "group_size": 4})
    assert column(run, "learned") == [0.25, 0.25]


def test_online_dpo_learns_from_pairs_of_a_group(train):
    algorithm = {"use": "online-dpo", "prompts_per_step": 4, "group_size": 4}
    run = train("online_dpo", algorithm=algorithm, backend={"use": "fsdp2", "reference": True})
    assert len(column(run, "rewards/accuracies")) == 2
    assert min(column(run, "pairs")) > 0


def test_a_price_on_repeats_joins_the_rewards_of_the_environment(train):
    run = train("no_repeats", environments=[{"use": "no-repeats", "environment": "even"}])
    assert len(column(run, "reward/repeated")) == len(column(run, "reward/even")) == 2


def test_sqlite_has_metrics_rollouts_and_events(train):
    run = train("sqlite_logger", loggers=["sqlite"])
    with sqlite3.connect(run / "run.sqlite") as database:
        assert database.execute("SELECT step FROM metrics WHERE name = 'reward/mean'").fetchall() == [(1,), (2,)]
        assert database.execute("SELECT count(*) FROM rollouts").fetchone() == (16,)
        assert ("opened",) in database.execute("SELECT kind FROM events").fetchall()
