"""The run folder keeps what was written, whatever happens next."""

import errno
import json
import math
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from whet.data.files import disk_errors, read_rows, use_umask
from whet.errors import CheckpointError, WhetError
from whet.interfaces.logger import Event
from whet.run.run_folder import SAMPLED_ROWS, RunFolder


def test_two_runs_cannot_have_one_folder(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.claim()
    with pytest.raises(CheckpointError, match="in use by another run"):
        second.claim()
    first.release()
    second.claim()
    second.release()
    second.release()


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts/step-000001.jsonl"])
def test_a_folder_that_is_moved_between_check_and_write_is_not_made_again(tmp_path, monkeypatch, name):
    run = RunFolder(tmp_path / "run")
    run.claim()
    check = run.check_held

    def check_and_move():
        check()
        run.path.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(run, "check_held", check_and_move)
    with pytest.raises(CheckpointError, match="was moved or deleted while its run wrote to it"):
        run.append(name, [{"step": 1}])
    assert not run.path.exists()
    run.release()


def test_rows_are_appended_and_a_torn_last_line_is_left_out(tmp_path):
    run = RunFolder(tmp_path)
    run.append("metrics.jsonl", [{"step": 1}, {"step": 2}])
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "loss": 0.')
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    run.append("metrics.jsonl", [{"step": 3}, {"step": 4}])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_numbers_that_are_not_finite_are_written_in_the_words_of_pythons_json(tmp_path):
    run = RunFolder(tmp_path)
    run.append("metrics.jsonl", [{"a": math.nan, "b": math.inf, "c": -math.inf}])
    assert (tmp_path / "metrics.jsonl").read_text() == '{"a": NaN, "b": Infinity, "c": -Infinity}\n'


def test_a_run_is_named_after_its_folder_however_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    paths = (".", "../mine", "inner/..", tmp_path / "mine", "../latest")
    assert [RunFolder(path).name for path in paths] == ["mine"] * 4 + ["latest"]


@pytest.mark.parametrize(("options", "wanted"), [({}, 0o600), ({"private_records": False}, 0o644)])
def test_what_the_model_said_is_private_unless_it_is_to_be_shared(tmp_path, options, wanted):
    run = RunFolder(tmp_path, **options)
    before = os.umask(0o022)
    try:
        for name in (
            "rollouts/step-000001.jsonl",
            "evaluations/step-000001-a.jsonl",
            "endpoint.jsonl",
            "metrics.jsonl",
        ):
            run.append(name, [{"step": 1}])
    finally:
        os.umask(before)
    modes = {str(f.relative_to(tmp_path)): f.stat().st_mode & 0o777 for f in tmp_path.rglob("*.jsonl")}
    assert modes.pop("metrics.jsonl") == 0o644
    assert set(modes.values()) == {wanted}


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002, 0o077])
def test_files_of_others_get_the_mode_that_new_files_get(tmp_path, umask):
    before = os.umask(umask)
    try:
        (tmp_path / "new").touch()
        os.close(os.open(tmp_path / "closed", os.O_CREAT, 0o600))
        use_umask(tmp_path / "closed")
    finally:
        os.umask(before)
    assert (tmp_path / "closed").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_rewinding_forgets_later_steps_alone(tmp_path):
    run = RunFolder(tmp_path)
    run.append("metrics.jsonl", [{"step": n, "loss": 1 / (n + 1)} for n in range(5)])
    for n in range(5):
        run.append(f"rollouts/step-{n:06d}.jsonl", [{"n": n}])
        run.append(f"evaluations/step-{n:06d}-test.jsonl", [{"n": n}])
        run.append(f"evaluations/tasks/step-{n:06d}-test.jsonl", [{"n": n}])
        run.write_json(f"evaluations/step-{n:06d}.json", {"n": n})
    run.rewind(2)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert len(list((tmp_path / "rollouts").iterdir())) == 3
    left = [f"step-{n:06d}" for n in range(3)]
    assert sorted(file.name for file in tmp_path.glob("evaluations/*.json")) == [f"{name}.json" for name in left]
    for folder in ("evaluations", "evaluations/tasks"):
        found = sorted(file.name for file in (tmp_path / folder).glob("*.jsonl"))
        assert found == [f"{name}-test.jsonl" for name in left]


def test_a_folder_has_steps_once_one_has_left_something(tmp_path):
    run = RunFolder(tmp_path)
    run.journal("opened")
    run.rewind(-1)
    assert not run.has_steps()
    run.append("metrics.jsonl", [{"step": 1}])
    assert run.has_steps()
    run.rewind(0)
    assert not run.has_steps()
    (run.checkpoints / "step-000001").mkdir(parents=True)
    assert run.has_steps()


def test_whole_files_are_replaced_whole(tmp_path):
    run = RunFolder(tmp_path)
    run.write_json("plan.json", {"a": 1})
    run.write_json("plan.json", {"a": 2})
    assert run.read_json("plan.json") == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert run.read_json("nothing.json") is None


def test_all_that_was_written_since_the_last_sync_is_durable_after_one_with_its_folders(tmp_path, monkeypatch):
    def recorded(descriptor):
        synced.add(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))

    run, synced = RunFolder(tmp_path), set()
    names = ["metrics.jsonl", "journal.jsonl", "rollouts/step-000001.jsonl", "evaluations/tasks/step-000001-e.jsonl"]
    for name in names:
        run.append(name, [{"step": 1}])
    run.write_json("evaluations/step-000001.json", {})
    monkeypatch.setattr(os, "fsync", recorded)
    run.sync()
    folders = {".", "rollouts", "evaluations", "evaluations/tasks"}
    assert synced == {*names, "evaluations/step-000001.json", *folders}
    synced.clear()
    run.append("endpoint.jsonl", [{"status": 200}])
    run.sync()
    assert synced == {"endpoint.jsonl", "."}


def test_the_journal_has_an_event_a_line(tmp_path):
    run = RunFolder(tmp_path)
    run.journal("opened", after_step=0)
    run.journal("saved", step=3)
    events = [json.loads(line)["event"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert events == ["opened", "saved"]


def test_text_of_a_model_stays_readable_and_steers_no_terminal(tmp_path):
    said = "né 東\\\x1b[2J\x9b2J\u202egpj.exe\u2028\ud800 end"
    RunFolder(tmp_path).append("rollouts/step-000001.jsonl", [{"text": said}])
    line = (tmp_path / "rollouts/step-000001.jsonl").read_bytes().decode()
    assert "né 東" in line
    assert line.removesuffix("\n").isprintable()
    assert json.loads(line) == {"text": said}
    assert [row["text"] for row in read_rows(tmp_path / "rollouts/step-000001.jsonl")] == [said]


def test_rows_that_a_power_cut_damaged_are_left_out(tmp_path):
    file = tmp_path / "journal.jsonl"
    file.write_bytes(b'{"event": "opened"}\n\x00\x00\x00\n{"event": "step"}\n{"eve')
    assert [row["event"] for row in read_rows(file)] == ["opened", "step"]


def test_a_file_system_without_locks_is_not_taken_for_another_run(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("whet.run.run_folder.fcntl.flock", no_locks)
    with pytest.raises(CheckpointError, match="cannot be locked: No locks available"):
        RunFolder(tmp_path).claim()


def test_a_full_disk_is_said_in_words():
    with (
        pytest.raises(WhetError, match=r"metrics\.jsonl: the disk is full; free some space, and start .* again$"),
        disk_errors(Path("metrics.jsonl")),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_of_a_library_in_rust_is_said_in_words_too():
    with pytest.raises(WhetError, match=r"cannot write x: the disk is full"), disk_errors(Path("x")):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="nothing of the kind"), disk_errors(Path("x")):
        raise RuntimeError("nothing of the kind")


def test_rows_that_do_not_fit_leave_those_before_whole(tmp_path):
    run = RunFolder(tmp_path)
    run.append("metrics.jsonl", [{"step": 1}])
    before, most = (tmp_path / "metrics.jsonl").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, most[1]))
    try:
        with pytest.raises(WhetError, match=r"metrics\.jsonl: File too large"):
            run.append("metrics.jsonl", [{"step": 2}, {"step": 3, "text": "x" * 100}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_rewinding_leaves_no_half_of_a_row_and_no_half_of_a_checkpoint(tmp_path):
    run = RunFolder(tmp_path)
    run.journal("step", step=7)
    with (tmp_path / "journal.jsonl").open("a") as stream:
        stream.write('{"event": "ste')
    (tmp_path / "checkpoints" / "step-000008.partial" / "backend").mkdir(parents=True)
    run.rewind(5)
    run.journal("opened")
    assert [row["event"] for row in read_rows(tmp_path / "journal.jsonl")] == ["step", "rewound", "opened"]
    assert list(run.checkpoints.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WhetError, match="cannot write"):
        RunFolder(tmp_path / "file" / "run").claim()


def test_rows_appended_later_are_there_once_settled_or_released(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.claim()
    run.publish_later("rollouts/step-000001.jsonl", lambda: Event("rollouts", 1, rows=[{"n": 1}]))
    run.settle()
    assert [row["n"] for row in read_rows(tmp_path / "rollouts/step-000001.jsonl")] == [1]
    run.publish_later("rollouts/step-000002.jsonl", lambda: Event("rollouts", 2, rows=[{"n": 2}]))
    run.release()
    assert [row["n"] for row in read_rows(tmp_path / "rollouts/step-000002.jsonl")] == [2]


def test_rows_written_later_reach_the_listener_on_the_callers_thread_in_a_bounded_number(tmp_path: Path) -> None:
    run, told = RunFolder(tmp_path), []
    run.listener = lambda event: told.append((event, threading.current_thread()))
    rows = [{"n": n} for n in range(SAMPLED_ROWS + 1)]
    run.publish_later("rollouts/step-000001.jsonl", lambda: Event("rollouts", 1, rows=rows))
    run.settle()
    assert told == [(Event("rollouts", 1, rows=rows[:-1]), threading.current_thread())]
    assert len(list(read_rows(tmp_path / "rollouts/step-000001.jsonl"))) == SAMPLED_ROWS + 1
    run.release()


def test_each_line_of_the_journal_is_an_event(tmp_path: Path) -> None:
    run, told = RunFolder(tmp_path), list[Event]()
    run.listener = told.append
    run.journal("saved", step=3)
    run.journal("opened", after_step=2, steps=4)
    run.journal("closed")
    assert [(event.kind, event.step) for event in told] == [("saved", 3), ("opened", 2), ("closed", None)]
    assert told[1].details == {"after_step": 2, "steps": 4}


def test_a_rewind_forgets_the_histograms_and_tables_of_later_steps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2):
        run.publish("histograms.jsonl", Event("histograms", step, rows=[{"step": step, "name": "x"}]))
        run.publish(f"tables/step-{step:06d}-worst.jsonl", Event("table", step, "worst", rows=[{"text": "no"}]))
    run.rewind(1)
    assert [row["step"] for row in read_rows(tmp_path / "histograms.jsonl")] == [1]
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["step-000001-worst.jsonl"]


def test_what_fails_later_is_raised_by_the_next_call(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "rollouts").write_text("a file where a folder should be")
    run.publish_later("rollouts/step-000001.jsonl", lambda: Event("rollouts", 1, rows=[{"n": 1}]))
    with pytest.raises(WhetError, match=r"cannot write .*rollouts"):
        run.publish_later("rollouts/step-000002.jsonl", lambda: Event("rollouts", 2, rows=[{"n": 2}]))
    run.release()


STRANGE = [
    "rollouts/step-x.jsonl",
    "rollouts/step-.jsonl",
    "rollouts/step-²²²²²².jsonl",
    "evaluations/step-.json",
    "evaluations/tasks/step-x.jsonl",
]


def test_files_that_no_run_writes_are_left_alone(tmp_path):
    run = RunFolder(tmp_path)
    written = [
        *STRANGE,
        "rollouts/step-000001.jsonl",
        "rollouts/step-000002.jsonl",
        "evaluations/step-000003-a-b.jsonl",
    ]
    for name in written:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "rollouts" / "step-000009.jsonl").mkdir()
    run.rewind(1)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json*")}
    assert left == {*STRANGE, "rollouts/step-000001.jsonl", "rollouts/step-000009.jsonl"}


@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl", "spans.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(WhetError, match=f"{name}: Is a directory"):
        RunFolder(tmp_path).rewind(1)
    (tmp_path / "identity.json").mkdir()
    with pytest.raises(WhetError, match=r"identity\.json: Is a directory"):
        RunFolder(tmp_path).read_json("identity.json")


@pytest.mark.parametrize("time", ["1e300", '"now"', "[]", "null", "-1e18"])
def test_a_time_that_is_none_is_named(tmp_path, time):
    (tmp_path / "journal.jsonl").write_text(f'{{"time": {time}, "event": "opened"}}\n')
    with pytest.raises(CheckpointError, match=r"journal\.jsonl, first line: the time .* is no time in seconds"):
        RunFolder(tmp_path).began()


def test_a_run_attempt_that_resumes_knows_when_the_first_one_began(tmp_path):
    first = RunFolder(tmp_path)
    began = first.began()
    assert first.began() == began
    first.journal("opened", began=began.timestamp())
    assert RunFolder(tmp_path).began() == began


def test_rows_whose_step_is_no_number_do_not_end_a_rewind(tmp_path):
    run = RunFolder(tmp_path)
    rows = [{"step": 1}, {"step": "x"}, {"step": None}, {"step": []}, {"step": 2}]
    for name in ("metrics.jsonl", "journal.jsonl"):
        run.append(name, rows)
    run.rewind(1)
    assert list(read_rows(tmp_path / "metrics.jsonl")) == [{"step": 1}]
    assert list(read_rows(tmp_path / "journal.jsonl"))[:5] == rows


def test_the_folder_of_a_job_that_is_killed_is_removed(tmp_path):
    code = """
from whet.run.run_folder import temporary_run_folder
with temporary_run_folder("eval") as folder:
    print(folder.path, flush=True)
    input()
"""
    job = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    folder = Path(job.stdout.readline().strip())
    assert folder.is_dir()
    job.kill()
    job.communicate()
    until = time.monotonic() + 60
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists()
