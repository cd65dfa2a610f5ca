"""The loop over the steps in a program of one's own: however it ends, the last finished step is saved."""

import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import whet
from whet.errors import CheckpointError, ConfigError, PluginError
from whet.plan.prepare import prepare
from whet.run import checkpoint
from whet.run.run_folder import RunFolder

PAUSING = Path(__file__).parent / "pausing.py"


@pytest.fixture
def config(tmp_path, small_run):
    sections = {
        "run": {"folder": str(tmp_path / "run"), "steps": 9}, "backend": {"use": "pausing"},
        "generator": {"use": "letters"}, "environments": [{"use": "letters"}],
        "weight_sync": {"probe": {"every": 0}}, "cluster": {"workers": "inline"}, "plugins": [str(PAUSING)],
    }  # fmt: skip
    return small_run(tmp_path, **sections)


def take_step(parts, step, takes=1):
    for _ in range(takes):
        batch = parts.rollouts.take(2)
        batch = batch.with_columns(advantages=batch["reward"] - batch["reward"].mean())
        step.log(parts.backend.train(batch, parts.loss))
    parts.sync_weights(version=step.number)
    step.finish(batch)


def saved(tmp_path):
    return checkpoint.newest(RunFolder(tmp_path / "run"))


def test_a_signal_in_a_wait_for_rollouts_saves_and_the_program_goes_on(config, tmp_path):
    finished = []
    with whet.open(config) as parts:
        for step in parts.steps:
            if step.number == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            take_step(parts, step)
            finished.append(step.number)
    assert finished == [1, 2, 3]
    assert saved(tmp_path) == 3
    with whet.open(config, "run.steps=5") as parts:
        assert [step.number for step in parts.steps if take_step(parts, step) is None] == [4, 5]


def test_weights_under_another_number_than_that_of_the_step_are_refused(config):
    with whet.open(config) as parts, pytest.raises(PluginError, match=r"sync_weights\(version=0\) in step 1; wanted"):
        for step in parts.steps:
            parts.sync_weights(version=step.number - 1)


def test_a_loop_that_is_left_between_two_steps_is_saved(config, tmp_path):
    with whet.open(config) as parts:
        for step in parts.steps:
            take_step(parts, step)
            if step.number == 3:
                break
    assert saved(tmp_path) == 3


def test_a_signal_between_two_updates_of_a_step_waits_for_its_end(config, tmp_path, monkeypatch):
    with whet.open(config) as parts:
        train = parts.backend.train

        def trained(*args):
            found = train(*args)
            if parts.steps.done == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return found

        monkeypatch.setattr(parts.backend, "train", trained)
        for step in parts.steps:
            take_step(parts, step, takes=2)
    assert saved(tmp_path) == 3


def test_a_run_in_a_notebook_has_an_event_loop_around_it(tmp_path, small_run):
    config = small_run(tmp_path, cluster={"workers": "inline"}, run={"folder": str(tmp_path / "run"), "steps": 1})

    async def cell():
        with whet.open(config) as parts:
            parts.algorithm.run(parts)

    asyncio.run(cell())
    assert saved(tmp_path) == 1


def test_a_folder_with_files_of_something_else_is_refused(config, tmp_path):
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "notes.txt").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"run\.folder: is .*run, which holds model of something else; choose another"
    ):
        prepare(config, ["loggers=[]"])
    assert (model / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"environment variables are not expanded"):
        prepare(config, ["run.folder=$HOME/run"])
    with pytest.raises(ConfigError, match=r"run\.folder: is .*deeper, and .*notes\.txt is a file; choose another"):
        prepare(config, [f"run.folder={model / 'notes.txt' / 'deeper'}"])


def test_a_folder_may_begin_with_the_home_of_the_user(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with whet.open(config, "run.folder=~/run", "run.steps=1") as parts:
        for step in parts.steps:
            take_step(parts, step)
    assert saved(tmp_path) == 1


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(config, tmp_path):
    with whet.open(config, "run.steps=2") as parts:
        for step in parts.steps:
            take_step(parts, step)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with (
        pytest.raises(CheckpointError, match="lacks its checkpoints, which its journal says were saved; bring them"),
        whet.open(config, "run.steps=3"),
    ):
        pass
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_folder_that_is_moved_away_is_not_made_again(config, tmp_path):
    match = "run was moved or deleted while its run wrote to it; bring it back"
    with pytest.raises(CheckpointError, match=match), whet.open(config) as parts:
        for step in parts.steps:
            if step.number == 3:
                (tmp_path / "run").rename(tmp_path / "elsewhere")
            take_step(parts, step)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_whose_folder_was_deleted_touches_nothing_of_the_next_run_in_it(config, tmp_path):
    other = RunFolder(tmp_path / "run")
    match = "run belongs to another run, which began in it when it was moved or deleted; choose another run.folder"
    with pytest.raises(CheckpointError, match=match), whet.open(config) as parts:
        for step in parts.steps:
            if step.number == 3:
                while not (tmp_path / "run" / "rollouts" / "step-000002.jsonl").exists():
                    time.sleep(0.01)  # another thread writes it
                shutil.rmtree(tmp_path / "run")
                other.claim()
                other.append("metrics.jsonl", [{"step": 1}])
                other.scratch.mkdir()
                kept = {str(file): file.stat().st_mtime_ns for file in other.path.rglob("*")}
            take_step(parts, step)
    assert {str(file): file.stat().st_mtime_ns for file in other.path.rglob("*")} == kept
    other.release()


def test_a_loop_that_forgets_to_send_weights_is_told_once(config, capsys):
    with whet.open(config, "run.steps=4") as parts:
        for step in parts.steps:
            batch = parts.rollouts.take(2)
            step.log(parts.backend.train(batch.with_columns(advantages=batch["reward"]), parts.loss))
            step.finish(batch)
    told = capsys.readouterr().err
    words = "step 1 trained the policy, and the generator samples with the weights of step 0; call parts.sync_weights("
    assert told.count("trained the policy") == told.count(words) == 1


def test_a_lock_that_somebody_deletes_ends_the_run_with_the_reason(config, tmp_path):
    with pytest.raises(CheckpointError, match=r"run lost its file \.lock, without which"), whet.open(config) as parts:
        for step in parts.steps:
            if step.number == 2:
                (tmp_path / "run" / ".lock").unlink()
            take_step(parts, step)


def test_a_step_logs_numbers_too(config, tmp_path):
    with whet.open(config, "run.steps=1") as parts:
        for step in parts.steps:
            step.log({"own": 2})
            step.log({"own": 4.0})
            with pytest.raises(PluginError, match=r"step\.log: text is 'a', wanted a number or a whet\.Metric"):
                step.log({"text": "a"})
            take_step(parts, step)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["own"] == 3.0
