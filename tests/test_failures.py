"""Whatever fails, the run ends in time with a message that says who, where and why, and leaves nothing running."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from whet_testing.forking import Program
from whet_testing.processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]

HERE = Path(__file__).parent
ENDLESS = {"steps": 100_000, "save_every": 10}
SOON = 2.0
"""Seconds of the deadlines in these tests."""
PATIENCE = 15.0
"""Seconds for everything else that an ending run has to do, on a busy machine."""


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


IMPATIENT = {"infrastructure_retries": 1}


def trouble(kind: str, every: int = 1, **keys: object) -> dict:
    return {"use": "trouble", "kind": kind, "every": every, **keys}


# A worker process that dies or hangs

APART = {"colocate": []}
UNRECOVERED = {"recovery": {"enabled": False}}
TWO_RANKS = {"ranks": {"backend": 2}}


def started(config: Path) -> subprocess.Popen[str]:
    """Start a run as a program of its own."""
    command = [sys.executable, "-m", "whet", "run", str(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def forked(start_whet) -> Callable[[Path], Program]:
    """Start a run whose processes have imported what they need."""
    return lambda config: start_whet("run", config)


def strike(begin_run, config: Path, victim: str, number: signal.Signals) -> tuple[str, float]:
    """Begin a run, send a signal to a worker in the middle of a step, and return the error and seconds until the end.

    Workers are told by their command lines.
    """
    process = begin_run(config)
    while not (config.parent / "run" / "rollouts" / "step-000002.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    (worker,) = [
        p.pid for p in descendants() if "whet.runtime.worker_process" in p.command and p.command.endswith(victim)
    ]
    os.kill(worker, number)
    begin = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    return output.partition("Error: ")[2], time.monotonic() - begin


@pytest.mark.parametrize(
    ("cluster", "victim", "named"),
    [
        ({}, "backend-0", r"(backend|generator|run) rank 0"),
        (APART, "backend-0", "backend rank 0"),
        (APART, "generator-0", "generator rank 0"),
        (TWO_RANKS, "backend-1", "backend rank 1"),
    ],
    ids=["the one for both roles", "the backend's", "the generator's", "the second of two"],
)
def test_a_worker_that_is_killed_is_named(tmp_path, small_run, forked, cluster, victim, named):
    run = {"folder": str(tmp_path / "run"), **ENDLESS}
    config = small_run(tmp_path, run=run, cluster={**cluster, **UNRECOVERED})
    errors, seconds = strike(forked if cluster else started, config, victim, signal.SIGKILL)
    assert re.match(rf"{named} failed in \w+: its process was killed by SIGKILL", errors), errors
    assert seconds < PATIENCE
    journal = rows(tmp_path / "run" / "journal.jsonl")
    assert (journal[-1]["event"], journal[-1]["error"]) == ("failed", "WorkerLost")


@pytest.mark.parametrize(
    ("cluster", "victim", "named"),
    [
        ({}, "backend-0", "(backend|generator) rank 0"),
        (APART, "generator-0", "generator rank 0"),
        (TWO_RANKS, "backend-1", "backend rank 1"),
    ],
    ids=["the one for both roles", "the generator's", "the second of two"],
)
def test_a_worker_that_hangs_is_named_when_its_deadline_has_passed(tmp_path, small_run, forked, cluster, victim, named):
    deadlines = dict.fromkeys(("train", "generate", "weight_sync", "save"), SOON)
    run = {"folder": str(tmp_path / "run"), **ENDLESS}
    errors, seconds = strike(
        forked,
        small_run(tmp_path, run=run, cluster={**cluster, **UNRECOVERED, "deadlines": deadlines}),
        victim,
        signal.SIGSTOP,
    )
    # a weight sync waits for running requests as well, for as long as one may take
    within = r"(\w+: no answer within 2|weight_sync: no answer within 4) s; its process is stopped"
    assert re.match(rf"{named} failed in {within}", errors), errors
    assert seconds < SOON + PATIENCE


# An environment or a grader that fails


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("raises", r"LookupError: nothing is known of \d+"),
        ("nan", r"gave the reward 'fine' = nan, wanted a finite number"),
        ("unstartable", r"the grader no_such_module:grade could not be started: .*no_such_module"),
    ],
)
def test_an_environment_that_always_fails_ends_the_run_with_its_cause(tmp_path, small_run, whet, kind, cause):
    config = small_run(
        tmp_path,
        plugins=[str(HERE / "troubles.py")],
        algorithm={"use": "grpo", "prompts_per_step": 1, "group_size": 2},
        environments=[trouble(kind)],
        rollout={"max_tokens": 4, "retries": 1, "max_failed_groups": 3, **IMPATIENT, "max_infrastructure_groups": 3},
    )
    error = whet("run", config).error
    assert re.match(
        r"3 groups in a row failed( because of their infrastructure)?; the last: environment 'trouble', task \d+, "
        r"sample \d failed 2 times; last: ",
        error,
    )
    assert re.search(cause, error), error
    assert (tmp_path / "run" / "metrics.jsonl").exists() is False


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("hangs", "hangs cannot decide about an answer: it needs more than 0.3 s of processor time"),
        ("crashes", "also alone in a fresh process: its process exited with code 3"),
    ],
)
def test_a_policy_whose_answers_a_grader_cannot_decide_about_trains_on(tmp_path, small_run, whet, kind, reason):
    config = small_run(
        tmp_path,
        run={"folder": str(tmp_path / "run"), "steps": 2},
        plugins=[str(HERE / "troubles.py")],
        algorithm={"use": "grpo", "prompts_per_step": 1, "group_size": 2},
        environments=[trouble(kind)],
        evaluation={"at_start": False, "environments": [trouble(kind, limit=1)]},
        rollout={"max_tokens": 4, "max_failed_groups": 1, "max_infrastructure_groups": 1},
        loggers=[{"use": "console"}],
    )
    done = whet("run", config)
    assert done.code == 0, done.errors
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["grader/undecided"] for row in metrics] == [2.0, 2.0]
    assert [row["reward/mean"] for row in metrics] == [0.0, 0.0]
    assert not any(row["groups/dropped"] or row["episodes/retried"] for row in metrics)
    assert (metrics[-1]["evaluation/trouble/undecided"], metrics[-1]["evaluation/trouble/reward"]) == (1.0, 0.0)
    for file in (tmp_path / "run" / "rollouts").iterdir():
        for row in rows(file):
            assert row["rewards"] == {"fine": 0.0}
            assert [reason in found for found in row["undecided"]] == [True]
    assert "step 1: graders could not decide about 2 responses within their limits" in done.output
    assert "undecided 1" in done.output


def test_a_reward_with_a_bug_ends_the_run_after_its_first_groups(tmp_path, small_run, whet):
    (tmp_path / "shout.py").write_text(MISSPELT)
    config = small_run(
        tmp_path,
        plugins=["./shout.py"],
        algorithm={"use": "grpo", "prompts_per_step": 8, "group_size": 2},
        environments=["shout"],
        loggers=["console"],
    )
    done = whet("run", config)
    assert done.error == (
        "environment 'shout' fails wherever it is played: all 16 episodes of its first 8 groups failed alike; "
        f"the last: AttributeError: 'str' object has no attribute 'is_upper' ({tmp_path}/shout.py:14, in loud)"
    )
    assert "failed after step 0" in done.output


MISSPELT = """
from attrs import frozen
from whet import hookimpl
from whet.component import Component
from whet.data.records import Task
from whet.interfaces.environment import SingleTurn

@frozen
class Shout:
    ...

# Its method is `isupper`.
def loud(text, data):
    return float(text.is_upper())

def build(config):
    return SingleTurn({"train": [Task("Say something loud.")]}, {"loud": loud})

@hookimpl
def whet_environments():
    return [Component("shout", Shout, f"{__name__}:build")]
"""


@pytest.fixture(scope="module")
def troubled(tmp_path_factory, small_run, whet) -> Path:
    """The run folder of three environments that each fail for some of their tasks."""
    folder = tmp_path_factory.mktemp("troubled")
    entries = [trouble("raises", 4), trouble("nan", 4), trouble("unstartable", 8)]
    config = small_run(
        folder,
        run={"folder": str(folder / "run"), "steps": 6},
        plugins=[str(HERE / "troubles.py")],
        environments=[{**entry, "name": entry["kind"]} for entry in entries],
        evaluation={"at_start": False, "environments": [trouble("raises", 4)]},
        algorithm={"use": "grpo", "prompts_per_step": 6, "group_size": 2},
        rollout={"max_tokens": 4, "retries": 1, **IMPATIENT},
    )
    done = whet("run", config)
    assert done.code == 0, done.errors
    return folder / "run"


def test_groups_of_failed_episodes_are_dropped_replaced_and_counted(troubled):
    metrics = rows(troubled / "metrics.jsonl")
    names = ("groups/dropped", "episodes/failed", "episodes/infrastructure", "episodes/retried")
    dropped, failed, lost, retried = (sum(row[name] for row in metrics) for name in names)
    assert dropped > 3
    assert failed > 0
    assert lost > 0  # graders that cannot be started
    assert dropped <= failed + lost <= 2 * dropped
    assert retried >= failed + lost
    assert len(metrics) == 6
    for step in range(1, 7):
        assert len({row["group"] for row in rows(troubled / "rollouts" / f"step-{step:06d}.jsonl")}) == 6


def test_what_failed_is_never_scored_and_never_trained_on(troubled):
    assert all(row["reward/mean"] == row["reward/fine"] == 1.0 for row in rows(troubled / "metrics.jsonl"))
    played = [row for file in (troubled / "rollouts").iterdir() for row in rows(file)]
    assert {row["environment"] for row in played} == {"raises", "nan", "unstartable"}
    assert all(row["task"] % 4 for row in played if row["environment"] != "unstartable")
    assert all(row["task"] % 8 for row in played if row["environment"] == "unstartable")


def test_each_of_several_environments_has_metrics_of_its_own(troubled):
    metrics, names = rows(troubled / "metrics.jsonl"), ("raises", "nan", "unstartable")
    for row in metrics:
        played = {found["environment"] for found in rows(troubled / "rollouts" / f"step-{row['step']:06d}.jsonl")}
        assert {name for name in names if f"{name}/reward/fine" in row} == played
        for name in played:
            assert row[f"{name}/reward/mean"] == row[f"{name}/pass_rate"] == row["pass_rate"] == 1.0
            assert row[f"{name}/response_length/mean"] <= 4.0


def test_an_evaluation_leaves_failed_episodes_out_and_counts_them(troubled):
    last = rows(troubled / "metrics.jsonl")[-1]
    assert (last["evaluation/trouble/dropped"], last["evaluation/trouble/reward"]) == (4.0, 1.0)


# A full disk

MOUNTED = """
import ctypes, shutil, subprocess, sys
from whet.cli import main
from whet_testing.forked_children import forked_children
if ctypes.CDLL(None, use_errno=True).unshare(0x20000):  # CLONE_NEWNS: the disk is seen by this process alone
    sys.exit(77)
size, disk, kept = sys.argv[-3:]
del sys.argv[-3:]
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
try:
    with forked_children():
        main()
finally:
    shutil.copytree(f"{disk}/run", kept)
"""


@pytest.mark.parametrize(
    ("size", "save_every", "where"),
    [
        ("4m", 1, r"run/checkpoints/step-00000\d\.partial/"),
        ("60k", 0, r"run/(metrics\.jsonl|spans\.jsonl|rollouts/step-\d+\.jsonl)"),
    ],
    ids=["by checkpoints", "by rollouts and metrics"],
)
def test_a_full_disk_is_named_and_costs_nothing_that_was_written(
    tmp_path, small_run, whet, programs, size, save_every, where
):
    disk = tmp_path / "disk"
    disk.mkdir()
    # Saves are waited for, so that the step whose checkpoint fails is the last one; test_saving.py has the others.
    small_run(
        tmp_path,
        run={"folder": str(disk / "run"), "steps": 60, "save_every": save_every, "save_in_background": False},
    )
    words = ["run", "run.yaml", size, str(disk), str(tmp_path / "kept")]
    done = programs.run(MOUNTED, words, folder=tmp_path, seconds=100)
    if done.returncode == 77:
        pytest.skip("mounting a small disk needs the right to have file systems of one's own")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(rf"cannot write .*{where}.*: the disk is full; free some space", done.stderr), done.stderr
    kept = tmp_path / "kept"
    steps = [row["step"] for row in rows(kept / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert steps
    for name in ("journal.jsonl", "spans.jsonl"):
        assert rows(kept / name)
    assert not list((kept / "checkpoints").glob("*.partial"))
    # The same command, once there is room.
    done = whet("run", tmp_path / "run.yaml", f"run.folder={kept}", f"run.steps={len(steps) + 1}")
    assert done.code == 0, done.errors
    opened = [row for row in rows(kept / "journal.jsonl") if row["event"] == "opened"]
    assert opened[-1]["after_step"] == (len(steps) - 1 if save_every else 0)
    assert [row["step"] for row in rows(kept / "metrics.jsonl")] == [*steps, len(steps) + 1]


# A model folder that is damaged


def rewrite(name: str, change) -> object:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def remove(name: str) -> object:
    return lambda folder: (folder / name).unlink()


def more_layers(config: bytes) -> bytes:
    changes = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    return json.dumps({**json.loads(config), **changes}).encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "model.path: .*model' holds no config.json"),
        (rewrite("config.json", lambda text: text[:50]), "config.json cannot be read as JSON"),
        (remove("model.safetensors"), "model.path: .*model' holds no weights"),
        (
            rewrite("model.safetensors", lambda data: data[:-1000]),
            "model.safetensors has .* bytes, its header tells of",
        ),
        (rewrite("tokenizer.json", lambda text: text[:1000]), "tokenizer.json cannot be read"),
        (
            rewrite("chat_template.jinja", lambda text: b"{% for m in messages %}"),
            "the chat template cannot be read: line 1",
        ),
        (rewrite("config.json", more_layers), r"backend rank 0 failed in start: .*model lack model\.layers\.2\."),
    ],
    ids=["no config", "half a config", "no weights", "half of the weights", "tokenizer", "template", "other weights"],
)
def test_a_damaged_model_folder_is_explained(tmp_path, tiny_model_folder, small_run, whet, damage, message):
    damage(shutil.copytree(tiny_model_folder, tmp_path / "model"))
    assert re.search(message, whet("run", small_run(tmp_path, model={"path": str(tmp_path / "model")})).error)
