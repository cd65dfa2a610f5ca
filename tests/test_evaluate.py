"""`whet eval` as people run it: what it starts, what it survives, and what it shows meanwhile."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]

HERE = Path(__file__).parent


@pytest.fixture
def evaluation(small_run):
    """Write a config to evaluate on 50 questions; `strike` says whom the environment strikes when."""

    def write(folder: Path, strike: dict | None = None, environment: dict | None = None, **cluster: object) -> Path:
        return small_run(
            folder,
            rollout={"max_tokens": 32},
            environments=[{"use": "striking"}],
            evaluation={"environments": [environment or {"use": "striking", **(strike or {})}]},
            plugins=[str(HERE / "striking.py"), str(HERE / "witness.py")],
            cluster={"threads": {"backend": 1, "generator": 1}, "colocate": [], **cluster},
        )

    return write


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "striking.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_replica_that_is_lost_is_replaced_and_the_result_is_the_same(tmp_path, evaluation, whet):
    done = whet("eval", evaluation(tmp_path, ranks={"generator": 2}), "--out", tmp_path / "whole")
    assert done.code == 0, done.errors
    struck = evaluation(tmp_path, {"victim": "generator-1", "questions": [20]}, ranks={"generator": 2})
    again = whet("eval", struck, "--out", tmp_path / "struck")
    assert again.code == 0, again.errors
    assert "generator rank 1 was lost in generate" in again.errors
    assert "it is restarted by itself (7 more allowed)" in again.errors
    assert again.output == done.output
    assert records(tmp_path / "struck") == records(tmp_path / "whole")


def test_an_earlier_evaluation_is_not_replaced(tmp_path, evaluation, whet):
    config, out = evaluation(tmp_path), tmp_path / "out"
    done = whet("eval", config, "--out", out)
    assert done.code == 0, done.errors
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    again = whet("eval", config, "--out", out, "run.seed=7")
    assert f"{out} is no empty folder: it holds evaluation.json" in again.error
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_over_budget_the_error_names_the_replica(tmp_path, evaluation, whet):
    strike = {"victim": "generator-0", "questions": [1]}
    error = whet("eval", evaluation(tmp_path, strike, recovery={"replicas": 0})).error
    assert "generator rank 0 failed in generate: its process was killed by SIGKILL" in error


RAISES = """
from whet import hookimpl
from whet.component import Component
from whet_hf.config import HfConfig

class Worker:
    def __init__(self, rank):
        raise LookupError("there is no such engine")

def build(config, site):
    return site.worker_group.spawn("file:" + __file__ + ":Worker", {})

@hookimpl
def whet_generators():
    return [Component("raises", HfConfig, __name__ + ":build", "whet_hf.facts:facts")]
"""


def test_the_log_that_an_error_names_is_there_to_be_read(tmp_path, evaluation, whet):
    (tmp_path / "raises.py").write_text(RAISES)
    given = ["generator=raises", f"plugins=[{tmp_path / 'raises.py'}, {HERE / 'striking.py'}]"]
    error = whet("eval", evaluation(tmp_path), *given).error
    log = Path(re.search(r"\(see (\S+)\)", error)[1])
    try:
        assert "there is no such engine" in log.read_text()
    finally:
        shutil.rmtree(log.parents[1])


@pytest.mark.parametrize("share", [[], [["backend", "generator"]]], ids=["apart", "shared"])
def test_no_process_is_started_for_the_backend(tmp_path, evaluation, whet, share):
    environment = {"use": "witness", "notes": str(tmp_path / "notes")}
    done = whet("eval", evaluation(tmp_path, environment=environment, colocate=share, ranks={"backend": 2}))
    assert done.code == 0, done.errors
    assert (tmp_path / "notes").read_text().splitlines() == ["generator-0"]


def test_in_a_terminal_it_shows_how_far_it_is_and_the_result_goes_to_stdout_alone(tmp_path, evaluation):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "whet", "eval", str(evaluation(tmp_path, workers="inline"))]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # what Linux says where nobody has the other end open any more
            while words := os.read(ours, 1 << 16):
                seen += words
        assert process.stdout is not None
        output = process.stdout.read().decode()
    os.close(ours)
    assert process.returncode == 0, seen.decode()
    assert "generator to start" in seen.decode() or " %" in seen.decode()
    assert "\x1b[?25h" in seen.decode()  # the cursor is back
    assert "95 % interval" in output
    assert "\x1b" not in output


def test_check_tells_whose_answers_cannot_be_voted_on(tmp_path, small_run, whet):
    here = Path(__file__).parent
    config = small_run(
        tmp_path,
        plugins=[str(here / "two_turns.py"), str(here / "even_digits.py")],
        evaluation={"majority_at": [4], "environments": [{"use": "two-turns", "samples": 4}]},
    )
    assert "the environment 'two-turns' does not say what an answer is" in whet("check", config).error
    done = whet("check", config, "evaluation.environments=[{use: even, samples: 4}]")
    assert done.code == 0, done.errors
    assert "evaluation.environments.0: whether its answers can be voted on shows when it is built" in done.output


TAKES_NO_WEIGHTS = """
from attrs import evolve
from whet import hookimpl
from whet.component import Component
from whet_hf.config import HfConfig
from whet_hf.facts import facts

def without(config, model):
    return evolve(facts(config, model), transports=())

@hookimpl
def whet_generators():
    return [Component("closed", HfConfig, "whet_hf.generator:HfGenerator", __name__ + ":without")]
"""


def test_a_generator_that_takes_no_weights_is_evaluated_and_refused_in_training(tmp_path, evaluation, whet):
    (tmp_path / "closed.py").write_text(TAKES_NO_WEIGHTS)
    given = ["generator=closed", f"plugins=[{tmp_path / 'closed.py'}, {HERE / 'striking.py'}]"]
    config = evaluation(tmp_path)
    done = whet("eval", config, *given, "--out", tmp_path / "closed")
    assert done.code == 0, done.errors
    assert whet("eval", config, "--out", tmp_path / "open").code == 0
    assert records(tmp_path / "closed") == records(tmp_path / "open")
    refused = whet("check", config, *given)
    assert "generator: no way to hand weights over" in refused.error
