"""GRPO with SGLang as the sampler, as people run it: on one machine and on Ray, and with what goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from whet_sglang.arguments import ENGINE
from whet_testing.processes import descendants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("no_orphans"),
    pytest.mark.skipif(not ENGINE.is_here, reason="SGLang is not installed; `nox -s 'engines(sglang)'` has it"),
]

GENERATOR = {"use": "sglang", "cache_gib": 0.125}
TESTS = Path(__file__).parents[1]


def metrics(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


@pytest.mark.parametrize(
    ("cluster", "rollout"),
    [({"colocate": []}, {"max_staleness": 1, "on_weight_update": "continue"}), ({"launcher": "ray"}, {})],
    ids=["local, a step apart", "ray"],
)
def test_grpo_learns_and_sampler_and_trainer_agree_on_every_step(tmp_path, small_run, whet, cluster, rollout):
    if cluster.get("launcher") == "ray":
        pytest.importorskip("ray")
    config = small_run(
        tmp_path,
        run={"folder": str(tmp_path / "run"), "steps": 30},
        algorithm={"use": "grpo", "prompts_per_step": 8, "group_size": 8},
        generator=GENERATOR,
        rollout={"max_tokens": 12, **rollout},
        weight_sync={"probe": {"every": 1}},
        cluster={"threads": {"backend": 1, "generator": 1}, **cluster},
    )
    done = whet("run", config, seconds=600)
    assert done.code == 0, done.errors
    rows = metrics(tmp_path / "run")
    assert len(rows) == 30
    assert all(row["probe/logprob_gap"] < 1e-4 for row in rows), [row["probe/logprob_gap"] for row in rows]
    if "max_staleness" not in rollout:
        assert all(row["logprob_gap/max"] < 1e-4 for row in rows), [row["logprob_gap/max"] for row in rows]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.1, rewards
    assert json.loads((tmp_path / "run/plan.json").read_text())["way"]["transport"] == "shared-memory"


def test_an_engine_that_says_it_has_new_weights_and_has_not_is_refused(tmp_path, small_run, whet):
    config = small_run(
        tmp_path,
        generator={**GENERATOR, "use": "deaf-sglang"},
        plugins=[str(TESTS / "deaf.py"), str(TESTS / "even_digits.py")],
    )
    error = whet("run", config, seconds=600).error
    assert error.startswith("after the weight sync of version 1 replica 0 of the generator does not compute"), error
    assert metrics(tmp_path / "run") == []


def test_a_foreign_agents_turns_are_recorded_with_the_tokens_that_the_engine_saw(tmp_path, small_run, whet):
    pytest.importorskip("openai")
    config = small_run(
        tmp_path,
        generator=GENERATOR,
        environments=[{"use": "foreign-turns"}],
        cluster={"threads": {"backend": 1, "generator": 1}},
        plugins=[str(TESTS / "foreign_turns.py")],
    )
    done = whet("run", config, seconds=600)
    assert done.code == 0, done.errors
    rows = metrics(tmp_path / "run")
    assert [row["turns/mean"] for row in rows] == [2, 2, 2]
    assert all(row["logprob_gap/max"] < 1e-4 for row in rows), [row["logprob_gap/max"] for row in rows]


def until(seen: Callable[[], bool], what: str) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + 400
    while not seen():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.2)


def scheduler() -> int:
    """Return the process of the engine's scheduler; 0 where there is none."""
    return next((p.pid for p in descendants() if "sglang::scheduler" in p.command), 0)


def test_a_killed_engine_is_replaced_with_the_current_weights_and_none_outlives_a_killed_driver(tmp_path, small_run):
    config = small_run(
        tmp_path,
        run={"folder": str(tmp_path / "run"), "steps": 4000},
        generator=GENERATOR,
        rollout={"max_tokens": 64},
        cluster={"threads": {"backend": 1, "generator": 1}, "colocate": []},
    )
    command, run = [sys.executable, "-m", "whet", "run", str(config)], tmp_path / "run"
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        until(lambda: len(metrics(run)) > 1, "a step")
        os.kill(first := scheduler(), signal.SIGKILL)
        until(lambda: scheduler() not in (0, first), "another engine")
        seen = len(metrics(run))
        until(lambda: len(metrics(run)) > seen + 3, "a step of another engine")
        assert all(row["logprob_gap/max"] < 1e-4 for row in metrics(run)), "it goes on with old weights"
    finally:
        process.kill()
        process.wait()
