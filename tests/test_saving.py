"""Training goes on while a checkpoint is written. Whatever ends the write, the checkpoint before it stays in force."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from whet.run import checkpoint
from whet.run.run_folder import RunFolder
from whet_testing.forking import Program
from whet_testing.runs import numbers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]

HERE = Path(__file__).parent
STEPS = 6


@pytest.fixture(scope="module")
def saving_run(tiny_model_folder):
    """Write the config of a run that saves after the steps 2, 4 and 6, and is held in the second save if `held`."""

    def write(folder: Path, held: bool = True, **run: object) -> Path:
        if held:
            (folder / "gates").mkdir()
        rows = [{"prompt": f"What is {n}?", "completion": f"{n} is {n}."} for n in range(12)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "run": {"folder": str(folder / "run"), "steps": STEPS, "save_every": 2, "keep": 0, **run},
            "model": {"path": str(tiny_model_folder)},
            "algorithm": {"use": "sft", "batch_size": 4},
            "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
            "data": {"train": [{"path": str(folder / "rows.jsonl")}]},
            "cluster": {"threads": {"backend": 1}},
            "plugins": [str(HERE / "gated_saving.py")],
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return folder / "run.yaml"

    return write


@pytest.fixture(scope="module")
def start(start_whet) -> Callable[[Path], Program]:
    return lambda config: start_whet("run", config, folder=config.parent)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory, saving_run, start) -> Path:
    """The same run without a hold, which waits for each save."""
    config = saving_run(tmp_path_factory.mktemp("waiting"), held=False, save_in_background=False)
    ended(start(config), 0)
    return config.parent / "run"


def ended(process: Program, code: int) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


def rows(config: Path, event: str) -> list[int]:
    found = RunFolder(config.parent / "run").events()
    return [row["step"] for row in found if row["event"] == event]


def wait_until(condition: Callable[[], object], process: Program) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def held_in_step_6(config: Path, process: Program) -> int:
    """Wait until step 5 is finished while the checkpoint of step 4 is written. Return the writing process."""
    writing = config.parent / "gates" / "writing"
    wait_until(lambda: writing.exists() and 5 in rows(config, "step"), process)
    run = RunFolder(config.parent / "run")
    assert rows(config, "saved") == [2]
    assert checkpoint.latest(run).step == 2
    return int(writing.read_text())


def go(config: Path, how: str = "") -> None:
    partial = config.parent / "gates" / "go.partial"
    partial.write_text(how)
    partial.rename(config.parent / "gates" / "go")


def same(config: Path, whole: Path) -> None:
    run = config.parent / "run"
    assert numbers(run) == numbers(whole)
    for file in ("model/model.safetensors", "checkpoints/step-000006/backend/tensors-00001.safetensors"):
        assert (run / file).read_bytes() == (whole / file).read_bytes()


def test_a_checkpoint_holds_the_weights_of_its_step_although_training_went_on(tmp_path, saving_run, start, waiting):
    config = saving_run(tmp_path)
    process = start(config)
    held_in_step_6(config, process)
    go(config)
    ended(process, 0)
    assert rows(config, "saved") == [2, 4, 6]
    same(config, waiting)
    file = "checkpoints/step-000004/backend/tensors-00001.safetensors"
    assert (tmp_path / "run" / file).read_bytes() == (waiting / file).read_bytes()


def test_a_run_killed_in_a_write_goes_on_after_the_checkpoint_before(tmp_path, saving_run, start, waiting):
    config = saving_run(tmp_path)
    process = start(config)
    held_in_step_6(config, process)
    process.kill()
    process.communicate()
    assert checkpoint.latest(RunFolder(tmp_path / "run")).step == 2
    go(config)
    ended(start(config), 0)
    same(config, waiting)


def test_a_worker_killed_in_a_write_is_named_and_the_run_goes_on_after_the_checkpoint_before(
    tmp_path, saving_run, start, waiting
):
    config = saving_run(tmp_path)
    process = start(config)
    writer = held_in_step_6(config, process)
    go(config)  # for the write of the next run attempt
    os.kill(writer, signal.SIGKILL)
    output = ended(process, 0)
    assert "backend rank 0 was lost in" in output
    assert "the run goes on after step 2" in output or rows(config, "saved").count(4) == 1
    same(config, waiting)


def test_a_write_that_fails_ends_the_run_with_role_rank_and_phase(tmp_path, saving_run, start, waiting):
    config = saving_run(tmp_path)
    process = start(config)
    held_in_step_6(config, process)
    go(config, "full")
    output = ended(process, 1)
    assert "backend rank 0" in output
    assert "in save" in output
    assert "No space left on device" in output
    assert rows(config, "saved") == [2]
    assert checkpoint.latest(RunFolder(tmp_path / "run")).step == 2
    (tmp_path / "gates" / "go").write_text("")
    ended(start(config), 0)
    same(config, waiting)


def test_a_signal_waits_for_the_write_and_saves_the_last_step(tmp_path, saving_run, start, waiting):
    config = saving_run(tmp_path, steps=100)
    process = start(config)
    held_in_step_6(config, process)
    process.send_signal(signal.SIGUSR1)
    go(config)
    ended(process, 143)
    last = rows(config, "step")[-1]
    assert rows(config, "saved") == [2, 4, last]
    assert checkpoint.latest(RunFolder(tmp_path / "run")).step == last < 100
    file = "checkpoints/step-000004/backend/tensors-00001.safetensors"
    assert (tmp_path / "run" / file).read_bytes() == (waiting / file).read_bytes()
