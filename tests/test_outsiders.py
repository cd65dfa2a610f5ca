"""Each file of `examples/plugins` keeps the rules of its kind, and takes part in two steps of a real run."""

import ast
import asyncio
import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

import whet
from whet.component import import_file, import_path
from whet.data.files import read_metrics
from whet.data.model_info import read_model
from whet.data.records import Request, Sampling
from whet_jobs.jobs import evaluate
from whet_testing.contracts.advantages import AdvantagesContract
from whet_testing.contracts.algorithm import AlgorithmContract
from whet_testing.contracts.backend import BackendContract
from whet_testing.contracts.environment import EnvironmentContract
from whet_testing.contracts.filter import FilterContract, group_of
from whet_testing.contracts.generator import GeneratorContract
from whet_testing.contracts.hooks import HooksContract
from whet_testing.contracts.logger import LoggerContract
from whet_testing.contracts.loss import LossContract

HERE = Path(__file__).resolve().parent
PLUGINS = HERE.parent / "examples" / "plugins"


def plugin(name):
    return import_file(PLUGINS / f"{name}.py")


def doubled(config):
    """Build an environment around which `no-repeats` is tested."""
    tasks = [whet.Task(f"{n} + {n}?", {"answer": str(2 * n)}) for n in range(1, 41)]
    return whet.SingleTurn({"train": tasks}, {"correct": lambda text, data: float(text == data["answer"])})


class TestNoRepeats(EnvironmentContract):
    def make(self):
        module = plugin("no_repeats")
        inner = whet.Selection("environments", whet.Component("doubled", object, import_path(doubled)), None)
        return module.NoRepeats(module.NoRepeatsConfig(environment=inner))

    def gold(self, task):
        return task.data["answer"]


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


class TestRaft(AlgorithmContract):
    use, plugins, document = "raft", [PLUGINS / "raft.py"], {"prompts_per_step": 4, "group_size": 4}


class TestOnlineDpo(AlgorithmContract):
    use, plugins, document = "online-dpo", [PLUGINS / "online_dpo.py"], {"prompts_per_step": 4, "group_size": 4}


class TestTableGenerator(GeneratorContract):
    def make(self, context):
        return plugin("table_model").TableGenerator(plugin("table_model").GeneratorConfig(), context)

    def weights(self, folder):
        size = read_model(folder).vocab_size
        return [("table", torch.zeros(size, size))]


class TestTableBackend(BackendContract):
    of_transformers, outputs = False, ("logprobs",)

    def make(self, context):
        return plugin("table_model").TableBackend(plugin("table_model").BackendConfig(lr=0.01), context)


@pytest.fixture
def config(small_run, tmp_path):
    """Write the config of two steps with plugins of the folder, and return its path."""

    def write(*names, **sections):
        files = [PLUGINS / f"{name}.py" for name in names]
        settings = {
            "run": {"folder": str(tmp_path / "run"), "steps": 2, "export": False},
            "cluster": {"workers": "inline"},
            "plugins": [str(file) for file in (*files, HERE / "even_digits.py", HERE / "addressed.py")],
            **sections,
        }
        return small_run(tmp_path, **settings)

    return write


@pytest.fixture
def train(config, tmp_path):
    """Train in this process, and return the run folder."""

    def run(*names, **sections):
        with whet.open(config(*names, **sections)) as parts:
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


@pytest.mark.parametrize(
    ("name", "environment", "reward"),
    [
        ("no_repeats", {"use": "no-repeats", "environment": "climbing"}, "repeated"),
        ("no_repeats", {"use": "no-repeats", "environment": "duel"}, "repeated"),
        ("no_repeats", {"use": "no-repeats", "environment": "ranked"}, "rank"),
    ],
)
def test_the_rewards_of_an_environment_reach_the_run(train, name, environment, reward):
    assert len(column(train(name, environments=[environment]), f"reward/{reward}")) == 2


def test_raft_learns_the_best_response_of_each_prompt(train):
    run = train("raft", algorithm={"use": "raft", "prompts_per_step": 4, "group_size": 4})
    assert column(run, "learned") == [0.25, 0.25]


def test_online_dpo_learns_from_the_best_and_the_worst_of_a_group(train):
    algorithm = {"use": "online-dpo", "prompts_per_step": 4, "group_size": 4}
    run = train("online_dpo", algorithm=algorithm, backend={"use": "fsdp2", "reference": True})
    assert len(column(run, "rewards/accuracies")) == 2
    assert min(column(run, "pairs")) > 0


def test_where_nothing_is_learned_no_step_is_taken(train, tmp_path):
    run = train("raft", algorithm={"use": "raft", "prompts_per_step": 2, "group_size": 2, "at_least": 9.0})
    assert column(run, "learned") == column(run, "grad_norm") == [0.0, 0.0]


def test_groups_of_equal_rewards_make_no_pair(train):
    algorithm = {"use": "online-dpo", "prompts_per_step": 1, "group_size": 2}
    run = train(
        "online_dpo", algorithm=algorithm, backend={"use": "fsdp2", "reference": True}, environments=["turns"],
        rollout={"max_tokens": 1, "temperature": 1.0e-3},
    )  # fmt: skip
    assert column(run, "pairs") == [0.0, 0.0]


def test_a_solved_task_is_left_out_after_some_times_and_a_failure_begins_anew():
    keep = plugin("retired_tasks").RetiredTasks(plugin("retired_tasks").RetiredTasksConfig(times=2))
    assert [keep(group_of(rewards)) for rewards in ([1, 1], [1, 0], [1, 1], [1, 1], [1, 1])] == [True] * 4 + [False]


def test_sqlite_has_metrics_rollouts_and_events(train):
    run = train("sqlite_logger", loggers=["sqlite"])
    with sqlite3.connect(run / "run.sqlite") as database:
        assert database.execute("SELECT step FROM metrics WHERE name = 'reward/mean'").fetchall() == [(1,), (2,)]
        assert database.execute("SELECT count(*) FROM rollouts").fetchone() == (16,)
        assert ("opened",) in database.execute("SELECT kind FROM events").fetchall()


def test_a_plateau_ends_the_run_after_a_whole_step(train, tmp_path):
    hook = {"use": "plateau", "metric": "lr", "patience": 2}
    run = train("plateau", hooks=[hook], run={"folder": str(tmp_path / "run"), "steps": 50, "export": False})
    assert column(run, "lr") == [1.0e-3] * 3
    assert (run / "checkpoints/step-000003").is_dir()


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_a_table_of_logits_learns(train, tmp_path, workers):
    run = train(
        "table_model", backend={"use": "table", "lr": 800.0}, generator="table", cluster={"workers": workers},
        run={"folder": str(tmp_path / "run"), "steps": 12 if workers == "inline" else 2, "export": False},
    )  # fmt: skip
    rewards = column(run, "reward/mean")
    assert workers == "process" or np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1


def test_a_model_behind_an_address_can_be_evaluated(config, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    service = plugin("openai_service")
    with whet.open(config(endpoint={"serve": True})) as parts:
        parts.rollouts.take(1)
        at = json.loads((tmp_path / "run/endpoint.json").read_text())
        monkeypatch.setenv("OPENAI_API_KEY", at["api_key"])
        there = {"base_url": at["base_url"], "model": at["model"]}
        request = Request("it", np.array([5, 6, 7]), Sampling(max_tokens=6), seed=3)
        found = asyncio.run(service.OpenaiService(service.OpenaiServiceConfig(**there), None).generate(request))
        assert len(found.tokens) == len(found.logprobs) <= 6
        evaluation = {"environments": [{"use": "even", "split": "train", "limit": 4}]}
        path = config("openai_service", generator={"use": "openai-service", **there}, evaluation=evaluation)
        evaluated = evaluate(path)
    assert evaluated.result.summary(model="it")["environments"]["even"]["figures"]["reward"]["value"] >= 0


CONCEPTS = {
    "no_repeats": 6, "topr": 5,
    "narrowing_clip": 5, "running_scale": 4, "retired_tasks": 3, "sqlite_logger": 2, "plateau": 3, "raft": 7,
    "online_dpo": 7, "table_model": 12, "openai_service": 5,
}  # fmt: skip
"""Most names of whet that a file may use."""


def test_a_file_needs_few_names_of_whet():
    assert {file.stem for file in PLUGINS.glob("*.py")} == {*CONCEPTS}
    for name, most in CONCEPTS.items():
        found = set()
        for node in ast.walk(ast.parse((PLUGINS / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0].startswith("whet"):
                found |= {alias.name for alias in node.names}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "whet":
                found.add(node.attr)
        assert len(found) <= most, f"{name} uses {len(found)} names: {', '.join(sorted(found))}"
