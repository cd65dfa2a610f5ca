"""Checkpoints are complete or not there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from whet.config.sections import KeepBestSection
from whet.errors import CheckpointError, WhetError
from whet.run import checkpoint
from whet.run.run_folder import RunFolder


def write(run: RunFolder, step: int, state: Mapping[str, Any], saves: Mapping[str, checkpoint.Save]) -> Path:
    return checkpoint.begin(run, step, state, saves)()


def save_weights(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 1000)


def test_what_is_written_is_read(tmp_path):
    run = RunFolder(tmp_path)
    write(run, 3, {"rollouts": {"groups": {"a": 7}}}, {"backend": save_weights})
    found = checkpoint.latest(run)
    assert found is not None
    assert (found.step, found.state["rollouts"]) == (3, {"groups": {"a": 7}})
    assert (found.part("backend") / "weights.bin").read_bytes() == b"w" * 1000


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert checkpoint.latest(RunFolder(tmp_path)) is None


def test_the_newest_is_picked_and_old_ones_are_pruned(tmp_path):
    run = RunFolder(tmp_path)
    for step in (5, 10, 15):
        write(run, step, {}, {"backend": save_weights})
    checkpoint.prune(run, 2)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-000010", "step-000015"]
    assert checkpoint.latest(run).step == 15


def test_of_a_checkpoint_that_is_a_link_only_the_link_is_removed(tmp_path):
    run, moved = RunFolder(tmp_path / "run"), tmp_path / "elsewhere"
    moved.mkdir()
    for step in (5, 10):
        write(run, step, {}, {"backend": save_weights})
        (run.checkpoints / f"step-{step:06d}").rename(moved / str(step))
        (run.checkpoints / f"step-{step:06d}").symlink_to(moved / str(step))
    checkpoint.prune(run, 1)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["step-000010"]
    write(run, 10, {}, {"backend": save_weights})
    assert not (run.checkpoints / "step-000010").is_symlink()
    (run.checkpoints / "step-000020.partial").symlink_to(moved / "5")
    write(run, 20, {}, {"backend": save_weights})
    (run.checkpoints / "step-000030.partial").symlink_to(moved / "5")
    run.rewind(20)
    assert sorted(folder.name for folder in run.checkpoints.iterdir()) == ["step-000010", "step-000020"]
    assert checkpoint.read(run.checkpoints / "step-000020").step == 20
    assert all((moved / name / "backend" / "weights.bin").exists() for name in ("5", "10"))


def test_a_failing_save_leaves_the_one_before(tmp_path):
    run = RunFolder(tmp_path)
    write(run, 5, {}, {"backend": save_weights})

    def broken(folder: Path) -> None:
        save_weights(folder)
        raise WhetError("the disk is full")

    with pytest.raises(WhetError):
        write(run, 10, {}, {"backend": broken})
    assert checkpoint.latest(run).step == 5
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["step-000005"]


@pytest.mark.parametrize("harm", ["flip", "shorten", "remove"])
def test_a_damaged_file_is_named(tmp_path, harm):
    run = RunFolder(tmp_path)
    file = write(run, 5, {}, {"backend": save_weights}) / "backend" / "weights.bin"
    if harm == "flip":
        file.write_bytes(b"w" * 999 + b"x")
    elif harm == "shorten":
        file.write_bytes(b"w" * 10)
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"weights\.bin"):
        checkpoint.latest(run)


def test_a_manifest_that_points_outside_is_refused(tmp_path):
    run = RunFolder(tmp_path)
    folder = write(run, 5, {}, {"backend": save_weights})
    (tmp_path / "secret").write_text("s")
    manifest = {"step": 5, "files": {"../../secret": [1, 0]}}
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="secret"):
        checkpoint.latest(run)


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3}', "nonsense"])
def test_a_manifest_that_is_no_manifest_gives_an_error_in_words(tmp_path, content):
    run = RunFolder(tmp_path)
    folder = write(run, 5, {}, {"backend": save_weights})
    (folder / checkpoint.MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.latest(run)


WRITER = """
import sys
from pathlib import Path
from whet.run import checkpoint
from whet.run.run_folder import RunFolder
def save(folder):
    for i in range(20):
        (folder / f"part-{i}").write_bytes(bytes([step % 256]) * 200_000)
run, step = RunFolder(sys.argv[1]), 0
while True:
    step += 1
    checkpoint.begin(run, step, {"note": step}, {"backend": save})()
    checkpoint.prune(run, 2)
    if step == 1:
        print("ready", flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    for round_ in range(6):
        folder = tmp_path / str(round_)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.037 * round_)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        found = checkpoint.latest(RunFolder(folder))
        assert found is not None
        assert found.state["note"] == found.step
        parts = {p.read_bytes() for p in found.part("backend").iterdir()}
        assert parts == {bytes([found.step % 256]) * 200_000}


def test_differences_are_shown_by_path_and_may_be_allowed():
    saved = {"algorithm": {"use": "grpo", "group_size": 8}, "run": {"seed": 0}, "environments": [{"use": "a"}]}
    now = {"algorithm": {"use": "grpo", "group_size": 16}, "run": {"seed": 0}, "environments": [{"use": "b"}]}
    assert checkpoint.differences(saved, now, []) == [
        "algorithm.group_size: the run has 8, the config gives 16",
        "environments.0.use: the run has 'a', the config gives 'b'",
    ]
    assert checkpoint.differences(saved, now, ["environments", "algorithm.group_size"]) == []
    assert checkpoint.differences(saved, {**saved, "data": [1]}, []) == [
        "data.0: the run has nothing, the config gives 1"
    ]


def test_a_checkpoint_without_its_manifest_is_not_passed_over(tmp_path):
    run = RunFolder(tmp_path)
    for step in (5, 10):
        write(run, step, {}, {"backend": save_weights})
    (run.checkpoints / "step-000010" / checkpoint.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"step-000010 is damaged: it lacks complete\.json"):
        checkpoint.latest(run)


def test_a_checkpoint_under_the_name_of_another_is_refused(tmp_path):
    run = RunFolder(tmp_path)
    folder = write(run, 5, {}, {"backend": save_weights})
    folder.rename(folder.with_name("step-000010"))
    with pytest.raises(CheckpointError, match=r"was moved: .* name the steps 5 and 10"):
        checkpoint.latest(run)


@pytest.mark.parametrize("position", [1e300, [], "12", {"epoch": 4}, {"records": 1.5}])
def test_a_position_in_the_data_that_is_none_is_refused(tmp_path, position):
    run = RunFolder(tmp_path)
    write(run, 5, {"data": position}, {"backend": save_weights})
    with pytest.raises(CheckpointError, match=r"`data` of state.json is .*, wanted numbers by name"):
        checkpoint.latest(run)


@pytest.mark.parametrize("position", [{}, {"records": 12}, {"records": 12, "epoch": 40}])
def test_a_position_in_the_data_is_read(tmp_path, position):
    run = RunFolder(tmp_path)
    write(run, 5, {"data": position}, {"backend": save_weights})
    found = checkpoint.latest(run)
    assert found is not None
    assert found.state["data"] == position


def test_a_manifest_that_lists_nothing_is_refused(tmp_path):
    run = RunFolder(tmp_path)
    folder = write(run, 5, {}, {"backend": save_weights})
    (folder / checkpoint.MANIFEST).write_text('{"step": 5, "files": {}}')
    with pytest.raises(CheckpointError, match=r"does not list state\.json"):
        checkpoint.latest(run)


def test_a_checkpoint_counts_only_once_it_is_durable(tmp_path):
    run, order = RunFolder(tmp_path), []

    def save(folder):
        order.append("copied")
        return lambda: (order.append("durable"), save_weights(folder))

    state = {"metrics": {"loss": 1.0}}
    complete = checkpoint.begin(run, 5, state, {"backend": save})
    state["metrics"]["loss"] = 2.0  # as a later step does
    assert order == ["copied"]
    assert checkpoint.latest(run) is None
    complete()
    assert order == ["copied", "durable"]
    assert checkpoint.latest(run).state["metrics"] == {"loss": 1.0}


class Killed(BaseException):
    """Ends a save in the middle, as a kill does: nothing is tidied up."""


def test_a_save_that_is_cut_short_at_any_call_leaves_the_one_before_in_force(tmp_path, monkeypatch):
    left, calls = 0, {os: ("fsync",), Path: ("rename", "write_text", "mkdir"), shutil: ("rmtree",)}

    def counted(function):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return function(*args, **kwargs)

        return call

    def save(folder):
        return lambda: save_weights(folder)

    run, outcomes, number = RunFolder(tmp_path), [], 0
    write(run, 5, {}, {"backend": save, "roles/critic": save})
    for owner, names in calls.items():
        for name in names:
            monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    while not outcomes or outcomes[-1] != "whole":
        number += 1
        left = number
        try:
            write(run, 10, {}, {"backend": save, "roles/critic": save})
            outcomes.append("whole")
        except Killed:
            outcomes.append(str(checkpoint.latest(run).step))
        left = 0
        shutil.rmtree(run.checkpoints / "step-000010", ignore_errors=True)
    assert outcomes.count("5") > 10
    assert outcomes[-2:] == ["10", "whole"]  # killed after the rename


def scored(run, steps):
    for step, value in steps.items():
        write(run, step, {"metrics": {"evaluation/test/correct": value}}, {"backend": save_weights})


def kept(run):
    return sorted(int(folder.name[5:]) for folder in run.checkpoints.iterdir())


@pytest.mark.parametrize(
    ("mode", "count", "expected"),
    [("max", 1, [20, 50, 60]), ("max", 2, [20, 30, 50, 60]), ("min", 1, [10, 50, 60]), ("min", 2, [10, 40, 50, 60])],
)
def test_the_best_are_never_pruned(tmp_path, mode, count, expected):
    run = RunFolder(tmp_path)
    scored(run, {10: 0.1, 20: 0.9, 30: 0.9, 40: 0.2, 50: float("nan")})
    write(run, 60, {"metrics": {"loss": 9.0}}, {"backend": save_weights})
    checkpoint.prune(run, 2, KeepBestSection("evaluation/test/correct", mode, count))
    assert kept(run) == expected


@pytest.mark.parametrize(("metric", "best"), [("validation/loss", 10), ("perplexity", 10), ("reward/mean", 20)])
def test_of_a_loss_the_smallest_is_the_best(tmp_path, metric, best):
    run = RunFolder(tmp_path)
    for step, value in ((10, 1.0), (20, 2.0)):
        write(run, step, {"metrics": {metric: value}}, {"backend": save_weights})
    assert checkpoint.ranking(run, KeepBestSection(metric))[0] == best
    assert checkpoint.ranking(run, KeepBestSection(metric, "max"))[0] == 20


def test_the_best_is_known_from_the_checkpoints_alone(tmp_path):
    scored(RunFolder(tmp_path), {10: 0.9, 20: 0.1})
    best = KeepBestSection("evaluation/test/correct")
    resumed = RunFolder(tmp_path)
    for step, value in ((30, 0.5), (40, 0.6), (50, 0.95)):
        scored(resumed, {step: value})
        checkpoint.prune(resumed, 1, best)
        assert kept(resumed) == ([10, step] if step < 50 else [50])
    assert checkpoint.ranking(resumed, best) == [50]


def test_the_advice_about_damage_knows_whether_a_checkpoint_is_before_it(tmp_path):
    run = RunFolder(tmp_path)
    scored(run, {10: 0.1, 20: 0.9})
    for step, advice in (
        (10, "no checkpoint is before it: bring it back"),
        (20, "resume from the checkpoint before"),
    ):
        folder = run.checkpoints / f"step-{step:06d}"
        (folder / checkpoint.STATE).unlink()
        with pytest.raises(CheckpointError, match=advice):
            checkpoint.read(folder)


def test_checkpoints_of_before_stay_while_none_has_the_metric(tmp_path):
    run, mistyped = RunFolder(tmp_path), KeepBestSection("evaluation/test/corect")
    scored(run, {10: 0.9, 20: 0.1, 30: 0.2, 40: 0.3})
    checkpoint.prune(run, 1, mistyped, before=20)
    assert kept(run) == [10, 20, 40]
    checkpoint.prune(run, 1, KeepBestSection("evaluation/test/correct"), before=20)
    assert kept(run) == [10, 40]


def test_a_metric_that_does_not_exist_is_named_with_those_that_do():
    metrics = {"loss": 1.0, "evaluation/test/correct": 0.5}
    assert "did you mean 'evaluation/test/correct'" in checkpoint.missing(
        KeepBestSection("evaluation/test/corect"), metrics
    )
    assert "known: loss" in checkpoint.missing(KeepBestSection("reward"), {"loss": 1.0})
    assert not checkpoint.missing(KeepBestSection("evaluation/test/correct"), metrics)
    assert not checkpoint.missing(KeepBestSection("evaluation/test/correct"), {"loss": 1.0})  # not evaluated


def test_nothing_is_written_or_deleted_in_a_folder_that_another_run_has_taken(tmp_path):
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    run.claim()
    for step in (1, 2):
        write(run, step, {}, {"backend": save_weights})
    complete = checkpoint.begin(run, 3, {}, {"backend": save_weights})
    (tmp_path / "run").rename(tmp_path / "away")
    other.claim()
    for step in (1, 2):
        write(other, step, {}, {"backend": save_weights})
    for touch in (
        complete,
        lambda: checkpoint.begin(run, 4, {}, {"backend": save_weights}),
        lambda: checkpoint.prune(run, 1),
        lambda: run.append("metrics.jsonl", [{"step": 1}]),
    ):
        with pytest.raises(CheckpointError, match="belongs to another run"):
            touch()
    run.remove("checkpoints")
    assert sorted(folder.name for folder in other.checkpoints.iterdir()) == ["step-000001", "step-000002"]
    run.release()
    other.release()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_the_newest_checkpoint_has_a_list_of_its_files(tmp_path, kind):
    run = RunFolder(tmp_path)
    write(run, 3, {}, {"backend": save_weights})
    left = run.checkpoints / "step-000012"
    left.mkdir() if kind == "folder" else left.touch()
    assert checkpoint.newest(run) == 3
    with pytest.raises(CheckpointError, match=r"step-000012 is damaged: it lacks complete\.json"):
        checkpoint.latest(run)
