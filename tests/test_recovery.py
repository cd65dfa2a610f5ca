"""A worker process that dies or hangs costs time and nothing else: every number is that of an undisturbed run."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from whet_testing.runs import numbers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]

HERE = Path(__file__).parent
STEPS, QUESTIONS = 4, 16
"""Of a run, and of each step."""


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def striking_run(small_run):
    """Write the config of a run whose workers are struck."""

    def write(folder: Path, strike: dict | None = None, **cluster: object) -> Path:
        return small_run(
            folder,
            run={"folder": str(folder / "run"), "steps": STEPS, "save_every": 2},
            algorithm={"use": "grpo", "prompts_per_step": 4, "group_size": 4, "minibatches": 2},
            rollout={"max_tokens": 48},
            environments=[{"use": "striking", **(strike or {})}],
            plugins=[str(HERE / "striking.py")],
            cluster={"threads": {"backend": 1, "generator": 1}, "colocate": [], "ranks": {"generator": 2}, **cluster},
            loggers=[{"use": "jsonl", "path": "log.jsonl"}],
        )

    return write


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, striking_run, whet) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = whet("run", striking_run(folder))
    assert done.code == 0, done.errors
    return folder / "run"


GAP = ("logprob_gap/mean", "logprob_gap/max")
"""What the sampler's logprobs differ by in the last bit when requests are batched with others than before."""


def same(run: Path, whole: Path) -> None:
    for row, expected in zip(numbers(run, "probe/"), numbers(whole, "probe/"), strict=True):
        assert {name: row.pop(name) for name in GAP} == pytest.approx({n: expected.pop(n) for n in GAP}, abs=1e-6)
        assert row == expected
    assert [row["step"] for row in rows(run / "log.jsonl")] == list(range(1, STEPS + 1))
    assert (run / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    for step in range(1, STEPS + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert episodes(run / name) == episodes(whole / name)


def episodes(file: Path) -> list[dict]:
    """All that is recorded but the sampler's logprobs, see `GAP`."""
    found = rows(file)
    for row in found:
        for sequence in row.get("sequences", ()):
            del sequence["sampler_logprobs"]
    assert any("sequences" in row for row in found) or "000001" not in file.name
    return found


def events(run: Path, name: str) -> list[dict]:
    return [row for row in rows(run / "journal.jsonl") if row["event"] == name]


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_replica_that_is_lost_while_it_generates_is_replaced(tmp_path, striking_run, whet, undisturbed, number):
    strike = {"victim": "generator-1", "signal": number, "questions": [2 * QUESTIONS + 1]}
    config = striking_run(tmp_path, strike, deadlines={"heartbeat": 8.0})
    done = whet("run", config)
    assert done.code == 0, done.errors
    (event,) = events(tmp_path / "run", "replica restarted")
    assert (event["role"], event["rank"], event["left"], event["phase"]) == ("generator", 1, 7, "generate")
    assert "generator rank 1 was lost in generate" in done.errors
    assert len(events(tmp_path / "run", "opened")) == 1
    same(tmp_path / "run", undisturbed)


def test_the_only_replica_is_waited_for(tmp_path, striking_run, whet, undisturbed):
    strike = {"victim": "generator-0", "questions": [QUESTIONS + 1, 2 * QUESTIONS + 1]}
    done = whet("run", striking_run(tmp_path, strike, ranks={"generator": 1}))
    assert done.code == 0, done.errors
    assert [event["rank"] for event in events(tmp_path / "run", "replica restarted")] == [0, 0]
    same(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("shared", [False, True], ids=["the trainer's own", "the one for both roles"])
def test_a_process_that_holds_the_trainer_is_started_again_after_the_last_checkpoint(
    tmp_path, striking_run, whet, undisturbed, shared
):
    placed = {"colocate": [["backend", "generator"]], "ranks": {}} if shared else {}
    asked = {"questions": [2 * QUESTIONS + 1]} if shared else {"answers": [3 * QUESTIONS]}
    strike = {"victim": "backend-0", "delay_seconds": 0.02, **asked}
    # Waited for, the checkpoint of step 2 is there when the process dies in step 3.
    done = whet("run", striking_run(tmp_path, strike, **placed), "run.save_in_background=false")
    assert done.code == 0, done.errors
    (event,) = events(tmp_path / "run", "run restarted")
    assert (event["rank"], event["left"]) == (0, 2)
    assert event["role"] in ("backend", "generator", "run") if shared else event["role"] == "backend"
    assert "SIGKILL" in event["cause"]
    assert [event["after_step"] for event in events(tmp_path / "run", "opened")] in ([0, 2], [0, 4])
    assert re.search(r"was lost in \w+: .*; the run goes on after step [24] \(2 more allowed\)", done.errors)
    same(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("recovery", [{"replicas": 1}, {"enabled": False}])
def test_over_budget_the_error_names_the_culprit(tmp_path, striking_run, whet, recovery):
    strike = {"victim": "generator-0", "questions": [QUESTIONS + 1, 2 * QUESTIONS + 1]}
    error = whet("run", striking_run(tmp_path, strike, ranks={"generator": 1}, recovery=recovery)).error
    assert re.match(r"generator rank 0 failed in \w+: its process was killed by SIGKILL", error), error
    assert ("replicas were restarted as often as cluster.recovery.replicas allows" in error) == ("replicas" in recovery)
    assert not events(tmp_path / "run", "run restarted")
    assert len(events(tmp_path / "run", "replica restarted")) == recovery.get("replicas", 0)


def test_a_run_that_dies_again_and_again_ends_with_the_last_error(tmp_path, striking_run, whet):
    strike = {"victim": "backend-0", "answers": [QUESTIONS, 2 * QUESTIONS, 3 * QUESTIONS], "delay_seconds": 0.0}
    done = whet("run", striking_run(tmp_path, strike, recovery={"restarts": 2}))
    assert done.code == 1
    assert "Error: backend rank 0 failed in" in done.errors
    assert [event["left"] for event in events(tmp_path / "run", "run restarted")] == [1, 0]


@pytest.mark.parametrize("shared", [False, True], ids=["replicas", "one process for both roles"])
def test_a_prompt_that_kills_the_engine_every_time_costs_its_group_and_not_the_run(tmp_path, small_run, whet, shared):
    config = small_run(
        tmp_path,
        run={"folder": str(tmp_path / "run"), "steps": 4, "save_every": 1},
        algorithm={"use": "grpo", "prompts_per_step": 12, "group_size": 2},
        rollout={"max_tokens": 4},
        generator={"use": "fragile"},
        environments=[{"use": "sevens"}],
        plugins=[str(HERE / "fragile.py")],
        cluster={"threads": {"backend": 1, "generator": 1}, **({} if shared else {"colocate": []})},
        loggers=[{"use": "jsonl", "path": "log.jsonl"}],
    )
    done = whet("run", config)
    assert done.code == 0, done.errors
    run = tmp_path / "run"
    dropped = sum(row["groups/dropped"] for row in numbers(run, "probe/"))
    assert dropped == sum(row["episodes/infrastructure"] > 0 for row in numbers(run, "probe/")) == 1
    lost = events(run, "run restarted" if shared else "replica restarted")
    assert [event["phase"] for event in lost] == ["generate"] * 3
    trained = Counter(row["group"] for step in range(1, 5) for row in rows(run / f"rollouts/step-{step:06d}.jsonl"))
    (gone,) = set(range(4 * 12 + 1)) - trained.keys()
    assert set(trained.values()) == {2}
    assert [row["dropped"] for row in events(run, "step") if "dropped" in row] == [str(gone)]
