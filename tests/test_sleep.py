"""Backend and generator that give their memory back in turns change no number of a run, whatever happens meanwhile."""

import json
import signal
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from whet import open as whet_open
from whet.errors import ConfigError
from whet.plan.prepare import prepare
from whet.run import compose
from whet_testing.runs import numbers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]

HERE = Path(__file__).parent
STEPS = 10
SLEEPING = "cluster.offload=always"


@pytest.fixture(scope="module")
def sleeping_run(small_run):
    """Write the config of a run that evaluates, saves and probes again and again."""

    def write(folder: Path, **sections: object) -> Path:
        return small_run(
            folder,
            **{
                "run": {"folder": str(folder / "run"), "steps": STEPS, "save_every": 4},
                "algorithm": {
                    "use": "grpo",
                    "prompts_per_step": 4,
                    "group_size": 4,
                    "minibatches": 2,
                    "loss": {"use": "clipped-pg", "kl": {"weight": 0.01}},
                },
                "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}, "reference": True},
                "evaluation": {"every": 3, "environments": [{"use": "even", "split": "train", "limit": 8}]},
                "weight_sync": {"probe": {"every": 1}},
                **sections,
            },
        )

    return write


@pytest.fixture(scope="module")
def awake(tmp_path_factory, sleeping_run) -> Path:
    """Run it in this process, with nobody asleep."""
    config = sleeping_run(tmp_path_factory.mktemp("awake"))
    compose.run(config, ["cluster.workers=inline"])
    return config.parent / "run"


LEFT_OUT = "probe/", "given_back_mib/"
"""Metrics of probes, with which a run attempt begins, and of what was given back."""


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def same(run: Path, whole: Path) -> None:
    assert numbers(run, *LEFT_OUT) == numbers(whole, *LEFT_OUT)
    assert (run / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    for step in range(1, STEPS + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (run / name).read_text() == (whole / name).read_text()


APART = ["cluster.colocate=[]"]
RAY = ["cluster.launcher=ray"]


@pytest.mark.parametrize(
    "where", [["cluster.workers=inline"], [], APART, RAY], ids=["inline", "shared", "apart", "ray"]
)
def test_ten_steps_with_turns_are_those_without_bit_for_bit(tmp_path, sleeping_run, awake, where, forks_under_ray):
    config = sleeping_run(tmp_path)
    compose.run(config, [SLEEPING, *where])
    same(tmp_path / "run", awake)
    found = [row for row in rows(tmp_path / "run/metrics.jsonl") if row["step"]]
    assert all(row["given_back_mib/generator"] > 0.2 for row in found)
    held = found[-1]["given_back_mib/generator"]
    assert found[-1]["given_back_mib/backend"] > 2 * held, "policy, reference and two moments"
    for role in ("backend", "generator"):
        assert all({f"seconds/{role}.sleep", f"seconds/{role}.wake"} <= row.keys() for row in found)
    assert json.loads((tmp_path / "run/plan.json").read_text())["turns"] == [["backend"], ["generator"]]
    assert not list((tmp_path / "run").rglob("asleep/*")), "what was given back is left behind"


def test_a_run_that_is_gone_on_with_sleeps_as_before(tmp_path, sleeping_run, awake):
    config = sleeping_run(tmp_path)
    compose.run(config, [SLEEPING, "cluster.workers=inline", "run.steps=6", "run.export=false"])
    compose.run(config, [SLEEPING, "cluster.workers=inline"])
    same(tmp_path / "run", awake)


@pytest.mark.parametrize("after_seconds", [0.0, 0.3])
def test_a_run_that_a_signal_ends_is_saved_and_goes_on(tmp_path, sleeping_run, whet, start_whet, awake, after_seconds):
    config, metrics = sleeping_run(tmp_path), tmp_path / "run/metrics.jsonl"
    process = start_whet("run", config, SLEEPING, "cluster.workers=inline")
    while process.poll() is None and not (metrics.exists() and len(rows(metrics)) > 2):
        time.sleep(0.01)
    time.sleep(after_seconds)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert list((tmp_path / "run/checkpoints").glob("step-*"))
    done = whet("run", config, SLEEPING, "cluster.workers=inline", seconds=240)
    assert done.code == 0, done.errors
    same(tmp_path / "run", awake)


@pytest.mark.parametrize(("victim", "step"), [("generator-0", 2), ("backend-0", 3)])
def test_a_worker_that_dies_in_its_sleep_is_replaced_and_no_number_changes(
    tmp_path, sleeping_run, whet, awake, victim, step
):
    """After step 2 the generator has taken weights and not woken; after step 3 it has evaluated."""
    struck = {"use": "striking-in-sleep", "victim": victim, "step": step}
    config = sleeping_run(tmp_path, plugins=[str(HERE / name) for name in ("even_digits.py", "striking_in_sleep.py")])
    config.write_text(config.read_text() + f"loggers: [{json.dumps(struck)}]\n")
    done = whet("run", config, SLEEPING, *APART, seconds=400)
    assert done.code == 0, done.errors
    events = [row["event"] for row in rows(tmp_path / "run/journal.jsonl")]
    assert ("replica restarted" if victim == "generator-0" else "run restarted") in events
    same(tmp_path / "run", awake)


def test_who_asks_at_the_endpoint_is_answered_by_one_that_is_awake(tmp_path, sleeping_run):
    pytest.importorskip("whet_endpoint", reason="whet-endpoint is not installed")
    config, answers, over = sleeping_run(tmp_path, endpoint={"serve": True}), [], threading.Event()
    chosen = [SLEEPING, "cluster.workers=inline", "run.steps=4"]

    def ask(address: dict) -> dict:
        said = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "return_token_ids": True}
        head = {"Authorization": f"Bearer {address['api_key']}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{address['base_url']}/chat/completions", json.dumps(said).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def ask_again_and_again(address: dict) -> None:
        while not over.is_set():
            answers.append(ask(address))

    with whet_open(config, *chosen) as parts:
        address = json.loads((tmp_path / "run/endpoint.json").read_text())
        ask(address)  # before the first step, too
        asking = threading.Thread(target=ask_again_and_again, args=(address,))
        asking.start()
        parts.algorithm.run(parts)
        over.set()
        parts.evaluate(4)  # who asked last is let in
        asking.join(60)
        assert not asking.is_alive()
    versions = {version for answer in answers for _, version in answer["choices"][0]["weight_versions"]}
    assert len(versions) > 1, "it was asked at one moment alone"
    assert len(rows(tmp_path / "run/metrics.jsonl")) == 4


def test_the_endpoint_is_closed_before_what_a_signal_has_saved(tmp_path, sleeping_run, start_whet):
    pytest.importorskip("whet_endpoint", reason="whet-endpoint is not installed")
    config, metrics = sleeping_run(tmp_path, endpoint={"serve": True}), tmp_path / "run/metrics.jsonl"
    overrides = ["cluster.workers=inline", "run.steps=100000", "run.save_every=0"]
    process = start_whet("run", config, SLEEPING, *overrides)
    while process.poll() is None and not (metrics.exists() and len(rows(metrics)) > 1):
        time.sleep(0.01)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    events = [row["event"] for row in rows(tmp_path / "run/journal.jsonl")]
    assert events.index("endpoint closed") < events.index("saved")


def test_what_cannot_sleep_is_refused_before_anything_starts(tmp_path, sleeping_run):
    config = sleeping_run(tmp_path, generator={"use": "vllm"})
    with pytest.raises(ConfigError, match="vllm of the generator can give memory back on cuda alone, and runs on cpu"):
        prepare(config, [SLEEPING])
    assert "take turns, asleep meanwhile: backend | generator" in prepare(
        config, ["generator.use=hf", SLEEPING]
    ).plan.describe()  # fmt: skip
