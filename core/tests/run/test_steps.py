"""Steps begin after the last checkpoint, write what happened, and end when asked."""

import contextlib
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve

from whet.config.sections import RunSection
from whet.data.batch import from_sequences
from whet.data.files import read_rows
from whet.data.metrics import histogram, largest, mean
from whet.data.spans import Spans
from whet.errors import PluginError, WorkerError, WorkerLost
from whet.interfaces.logger import Event
from whet.run.run_folder import RunFolder
from whet.run.steps import Interrupted, Sinks, Steps

BATCH = from_sequences([{"tokens": np.arange(3), "loss_mask": [False, True, True]}], prompt_lengths=[1])


class Told:
    """Notes what a run is told."""

    def __init__(self):
        self.saved, self.logged, self.evaluated, self.records = [], [], [], []

    def sinks(self):
        return Sinks(
            records=lambda step, batch: self.records.append(step) or {},
            evaluate=lambda step: self.evaluated.append(step) or {"evaluation/test/reward": mean(0.5)},
            log=lambda step, numbers: self.logged.append((step, dict(numbers))),
            save=lambda step, carried, ends: self.saved.append(step),
            gather=lambda: {"reward/mean": mean(3.0, 4.0)},
        )


def make(tmp_path, told, done=0, evaluate_every=0, **section):
    section = RunSection(folder=str(tmp_path), **{"steps": 5, **section})
    return Steps(RunFolder(tmp_path), section, done, evaluate_every, Spans(), told.sinks())


def test_what_is_known_of_the_model_as_it_comes_is_one_row_of_step_0(tmp_path):
    told = Told()
    steps = make(tmp_path, told, steps=1)
    steps.log_start({"evaluation/test/reward": mean(0.25)})
    steps.log_start({"validation/loss": mean(2.0)})
    for step in steps:
        step.finish(BATCH)
    first, second = read_rows(tmp_path / "metrics.jsonl")
    assert (first["step"], first["evaluation/test/reward"], first["validation/loss"]) == (0, 0.25, 2.0)
    assert second["step"] == 1
    assert "validation/loss" not in second
    assert [step for step, _ in told.logged] == [0, 1]


def test_every_step_is_written_with_its_merged_metrics(tmp_path):
    told = Told()
    for step in make(tmp_path, told, steps=2):
        step.log({"loss": mean(2.0, 1.0), "gap": largest(1.0)})
        step.log({"loss": mean(4.0, 2.0), "gap": largest(0.5)})
        step.finish(BATCH)
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2]
    assert (rows[0]["loss"], rows[0]["gap"], rows[0]["reward/mean"], rows[0]["tokens"]) == (2.0, 1.0, 0.75, 3)
    assert told.logged[1][0] == 2


@pytest.mark.parametrize("name", ["step", "time"])
def test_a_metric_with_the_name_of_a_key_of_every_row_is_refused(tmp_path, name):
    for step in make(tmp_path, Told(), steps=1):
        step.log({name: mean(9.0)})
        with pytest.raises(PluginError, match=f"a metric is named '{name}', a key of every row"):
            step.finish(BATCH)
        break


def test_a_metric_with_the_name_of_one_of_the_run_is_refused(tmp_path):
    for step in make(tmp_path, Told(), steps=1):
        step.log({"reward/mean": mean(99.0)})
        with pytest.raises(PluginError, match="metric of the algorithm or its loss is named 'reward/mean'"):
            step.finish(BATCH)
        break
    for step in make(tmp_path / "evaluated", Told(), steps=1):
        step.log({"evaluation/test/reward": mean(99.0)})
        with pytest.raises(PluginError, match="is named 'evaluation/test/reward'"):
            step.finish(BATCH)
        break


def test_histograms_and_tables_are_kept_in_files_and_told(tmp_path):
    told, events = Told(), []
    steps = make(tmp_path, told, steps=1)
    steps._run.listener = events.append
    for step in steps:
        step.log({"gap": histogram(np.array([0.1, 0.7]), (0.0, 0.5, 1.0)), "loss": mean(1.0)})
        step.log({"gap": histogram(np.array([2.0]), (0.0, 0.5, 1.0))})
        step.table("worst", [{"task": 3, "text": "no"}])
        step.finish(BATCH)
    (row,) = read_rows(tmp_path / "histograms.jsonl")
    assert row == {"step": 1, "name": "gap", "edges": [0.0, 0.5, 1.0], "counts": [0, 1, 1, 1]}
    assert list(read_rows(tmp_path / "tables/step-000001-worst.jsonl")) == [{"task": 3, "text": "no"}]
    assert "gap" not in next(read_rows(tmp_path / "metrics.jsonl"))
    found = {event.kind: event for event in events}
    assert found["histograms"] == Event("histograms", 1, rows=[row])
    assert found["table"] == Event("table", 1, "worst", rows=[{"task": 3, "text": "no"}])


@pytest.mark.parametrize("name", ["", "../outside", "a b", "-", "é", "a\n", "x" * 101])
def test_a_table_with_a_strange_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="a table cannot have the name"):
        next(iter(make(tmp_path, Told()))).table(name, [])


def test_it_goes_on_after_the_last_checkpoint(tmp_path):
    numbers = []
    for step in make(tmp_path, Told(), done=3):
        numbers.append(step.number)
        step.finish(BATCH)
    assert numbers == [4, 5]


def test_it_saves_and_evaluates_when_due_and_at_the_end(tmp_path):
    told = Told()
    for step in make(tmp_path, told, save_every=2, evaluate_every=3):
        step.finish(BATCH)
    assert told.saved == [2, 4, 5]
    assert told.evaluated == [3, 5]
    assert told.records == [1, 2, 3, 4, 5]


def test_without_an_interval_it_saves_once_at_the_end(tmp_path):
    told = Told()
    for step in make(tmp_path, told):
        step.finish(BATCH)
    assert told.saved == [5]


def test_the_seed_of_a_step_depends_on_run_seed_and_number_alone(tmp_path):
    def seeds(**section):
        steps = make(tmp_path, Told(), **section)
        found = []
        for step in steps:
            found.append(step.seed)
            step.finish(BATCH)
        return found

    assert seeds(steps=5)[2:] == [*seeds(steps=5, done=2)]
    assert seeds(seed=1) != seeds(seed=2)


@pytest.fixture
def hangups():
    """Receive SIGHUP in this process, also under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_after_the_step_and_saves(tmp_path, hangups, number):
    told = Told()
    steps = make(tmp_path, told)
    before = signal.getsignal(number)
    for step in steps:
        if step.number == 2:
            os.kill(os.getpid(), number)
        step.finish(BATCH)
    assert (steps.done, steps.stopped_by, told.saved) == (2, number, [2])
    assert signal.getsignal(number) is before


def test_a_warning_of_a_scheduler_ends_the_run_as_sigterm_does(tmp_path, capsys):
    told = Told()
    steps = make(tmp_path, told)
    for step in steps:
        os.kill(os.getpid(), signal.SIGUSR1)
        step.finish(BATCH)
    assert (steps.done, steps.stopped_by, told.saved) == (1, signal.SIGTERM, [1])
    assert (
        capsys.readouterr().err == "SIGUSR1: finishing step 1, then saving; Ctrl-C again ends at once, without saving\n"
    )


def timed_steps(tmp_path, monkeypatch, seconds, left, save_seconds=0.0):
    """Take steps of a fixed length with so many seconds left before a limit, on a clock that only steps move."""
    told, now = Told(), [1000.0]
    monkeypatch.setattr("whet.run.steps.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("whet.run.steps.time.time", lambda: now[0])
    steps = make(tmp_path, told, steps=100)
    steps._sinks.saving.longest = save_seconds
    steps.end_by(1000.0 + left + 500.0, "another limit comes")
    steps.end_by(1000.0 + left, "the job ends")
    for step in steps:
        now[0] += seconds[min(step.number, len(seconds)) - 1]
        step.finish(BATCH)
    return steps, told, 1000.0 + left - now[0]


@pytest.mark.parametrize(
    ("seconds", "left", "save", "done"),
    [
        ([10.0], 200.0, 30.0, 14),  # 1.2 * (10 + 30) + 20 = 68 s must be left: 70 are after 13 steps, 60 after 14
        ([10.0], 200.0, 0.0, 10),  # a save that is not known may take 60 s: 104 s must be left
        ([100.0, 10.0], 300.0, 30.0, 15),  # the first step of a run attempt does not count
        ([10.0, 10.0, 40.0, 10.0], 250.0, 30.0, 12),  # 1.2 * (40 + 30) + 20 = 104 s must be left
        ([10.0], 5.0, 30.0, 1),
    ],
)
def test_a_run_ends_before_a_step_and_a_save_no_longer_fit(tmp_path, monkeypatch, capsys, seconds, left, save, done):
    steps, told, remaining = timed_steps(tmp_path, monkeypatch, seconds, left, save)
    assert (steps.done, steps.stopped_by, told.saved) == (done, signal.SIGTERM, [done])
    assert f"the job ends in {max(remaining, 0.0):.0f} s; a step took up to" in capsys.readouterr().err


def test_without_a_limit_no_run_ends_early(tmp_path):
    steps = make(tmp_path, Told())
    for step in steps:
        step.finish(BATCH)
    assert steps.stopped_by is None


def test_steps_go_on_while_a_checkpoint_is_written_and_the_end_waits(tmp_path):
    told, go, written = Told(), threading.Event(), []
    sinks = told.sinks()

    def save(step, carried, ends):
        sinks.saving.start(lambda: written.append((go.wait(60.0), step)), time.perf_counter())

    steps = Steps(
        RunFolder(tmp_path), RunSection(folder=str(tmp_path), steps=4, save_every=3), 0, 0, Spans(),
        evolve(sinks, save=save),
    )  # fmt: skip
    for step in steps:
        assert not written
        if step.number == 4:
            go.set()
        step.finish(BATCH)
    assert written == [(True, 3), (True, 4)]


def test_a_write_that_failed_is_raised_before_the_next_step(tmp_path):
    told = Told()
    sinks = told.sinks()

    def fail():
        raise WorkerError("backend", 1, "save", "the disk is full")

    def save(step, carried, ends):
        sinks.saving.start(fail, time.perf_counter())
        while sinks.saving.busy:
            time.sleep(0.001)

    steps = Steps(
        RunFolder(tmp_path), RunSection(folder=str(tmp_path), steps=4, save_every=2), 0, 0, Spans(),
        evolve(sinks, save=save),
    )  # fmt: skip
    with pytest.raises(WorkerError, match="disk is full") as raised:
        for step in steps:
            step.finish(BATCH)
    assert (raised.value.role, raised.value.rank, raised.value.phase) == ("backend", 1, "save")
    assert steps.done == 2


def test_the_loop_is_stopped_after_the_step_and_saves(tmp_path):
    told = Told()
    steps = make(tmp_path, told)
    for step in steps:
        if step.number == 2:
            steps.stop()
        step.finish(BATCH)
    assert (steps.done, steps.stopped_by, told.saved) == (2, signal.SIGTERM, [2])


def test_a_closed_terminal_is_ignored_under_nohup(tmp_path, hangups):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    steps = make(tmp_path, Told())
    for step in steps:
        os.kill(os.getpid(), signal.SIGHUP)
        step.finish(BATCH)
    assert steps.stopped_by is None


def test_ctrl_c_ends_the_run_in_order_when_what_reads_its_output_is_gone(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    told = Told()
    with open(writer, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        for step in make(tmp_path, told):
            os.kill(os.getpid(), signal.SIGINT)
            step.finish(BATCH)
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            gone.close()
    assert told.saved == [1]


def test_a_signal_ends_an_interruptible_wait_at_once(tmp_path):
    told = Told()
    steps = make(tmp_path, told)
    with pytest.raises(Interrupted):
        for step in steps:
            with steps.interruptible():
                if step.number == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                    raise AssertionError("the wait went on")
            step.finish(BATCH)
    steps.save_now()
    assert told.saved == [2]


def test_a_second_sigterm_does_not_cut_saving_short(tmp_path):
    told = Told()
    steps = make(tmp_path, told)
    with pytest.raises(Interrupted):
        for step in steps:
            with steps.interruptible():
                if step.number == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
            step.finish(BATCH)
    steps._sinks = evolve(
        steps._sinks, save=lambda step, *_: (os.kill(os.getpid(), signal.SIGTERM), told.saved.append(step))
    )
    steps.save_now()
    assert told.saved == [1]


def test_a_step_that_is_not_finished_is_an_error(tmp_path):
    with pytest.raises(PluginError, match=r"step 1 was not finished"):
        for _ in make(tmp_path, Told()):
            pass


def test_spans_are_written_and_summed(tmp_path):
    told = Told()
    steps = make(tmp_path, told, steps=1)
    for step in steps:
        with steps._spans.phase("backend", "train"):
            pass
        with steps._spans.phase("backend", "train"):
            pass
        step.finish(BATCH)
    spans = list(read_rows(tmp_path / "spans.jsonl"))
    assert [(s["step"], s["role"], s["phase"]) for s in spans] == [(1, "backend", "train")] * 2
    assert told.logged[0][1]["seconds/backend.train"] == pytest.approx(sum(s["seconds"] for s in spans), abs=1e-5)


def test_a_loop_that_an_error_keeps_alive_takes_no_signals_once_steps_are_closed(tmp_path):
    own = signal.getsignal(signal.SIGTERM)
    first, second = make(tmp_path, Told()), make(tmp_path, Told())
    left = iter(first)
    next(left)
    first.close()
    assert signal.getsignal(signal.SIGTERM) is own
    loop = iter(second)
    next(loop)
    taken = signal.getsignal(signal.SIGTERM)
    left.close()  # as the collector of garbage does, some time
    assert signal.getsignal(signal.SIGTERM) is taken is not own
    second.close()
    assert signal.getsignal(signal.SIGTERM) is own


def test_what_an_algorithm_carries_is_that_of_the_last_finished_step(tmp_path):
    seen = []
    told = Told()
    section = RunSection(folder=str(tmp_path), steps=4, save_every=2)
    sinks = evolve(told.sinks(), save=lambda step, carried, ends: seen.append((step, dict(carried))))
    steps = Steps(RunFolder(tmp_path), section, 1, 0, Spans(), sinks, state={"weight": 0.1, "seen": []})
    assert steps.state == {"weight": 0.1, "seen": []}
    for step in steps:
        steps.state["weight"] *= 3
        steps.state["seen"].append(step.number)
        step.finish(BATCH)
        steps.state["weight"] += 100  # of a step that is not finished
        steps.state["weight"] -= 100
    assert [(step, round(state["weight"], 6)) for step, state in seen] == [(2, 0.3), (4, 2.7)]
    assert [state["seen"] for _, state in seen] == [[2], [2, 3, 4]]
    steps.state["seen"].append(0)
    assert steps.saved_state["seen"] == [2, 3, 4]
    steps.state["weight"] = 0.0
    assert round(steps.saved_state["weight"], 6) == 2.7


@pytest.mark.parametrize("kept", [np.arange(2), (1, 2), {1: 2}, float("nan")], ids=str)
def test_what_an_algorithm_carries_and_json_changes_is_refused_at_once(tmp_path, kept):
    told = Told()
    steps = make(tmp_path, told)
    steps.state.update(fine=1, average=kept)
    with pytest.raises(PluginError, match=r"steps.state\['average'\] gave"):
        next(iter(steps)).finish(BATCH)
    assert not told.logged


def test_a_step_is_finished_once(tmp_path):
    steps = iter(make(tmp_path, Told()))
    first = next(steps)
    first.finish(BATCH)
    with pytest.raises(PluginError, match="step 1 is finished already"):
        first.finish(BATCH)
    next(steps)
    with pytest.raises(PluginError, match="step 1 is finished already"):
        first.finish(BATCH)
    assert len(list(read_rows(tmp_path / "metrics.jsonl"))) == 1


def test_weights_are_sent_under_the_number_of_their_step(tmp_path):
    steps = make(tmp_path, Told(), done=2)
    steps.check_version(2)
    for step in steps:
        for wrong in (step.number - 1, step.number + 1):
            with pytest.raises(PluginError, match=rf"sync_weights\(version={wrong}\) in step {step.number}; wanted"):
                steps.check_version(wrong)
        steps.check_version(step.number)
        step.finish(BATCH)
        steps.check_version(step.number)


def test_weights_that_are_sent_before_training_are_noticed(tmp_path, capsys):
    steps = make(tmp_path, Told(), done=2)
    for step in steps:
        steps.check_sent()
        steps.check_version(step.number)
        steps.weights_change(policy=True)
        step.finish(BATCH)
    told = capsys.readouterr().err
    assert told.count("step 3 trained the policy, and the generator samples with the weights of step 2;") == 1
    assert told.count("trained the policy") == 1


def test_weights_that_are_sent_again_after_training_are_the_newest(tmp_path, capsys):
    steps = make(tmp_path, Told())
    for step in steps:
        for _ in range(2):
            steps.weights_change(policy=True)
            steps.check_version(step.number)
            steps.check_sent()
        steps.weights_change()  # of a critic
        step.finish(BATCH)
        steps.check_sent()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("batch", [None, {"tokens": [1]}])
def test_what_is_no_batch_does_not_finish_a_step(tmp_path, batch):
    with pytest.raises(PluginError, match=r"step 1: step.finish got .*, wanted the batch of the step"):
        next(iter(make(tmp_path, Told()))).finish(batch)


class JudgeError(Exception):
    """Of a judge that cannot be reached."""


@pytest.mark.parametrize("cause", [JudgeError("gone"), OSError("no route")], ids=str)
def test_a_step_whose_evaluation_fails_is_written_and_saved(tmp_path, cause):
    told = Told()
    steps = make(tmp_path, told, save_every=0, evaluate_every=3)

    def evaluate(step):
        raise cause

    steps._sinks = evolve(told.sinks(), evaluate=evaluate)
    with pytest.raises(type(cause)):
        for step in steps:
            step.log({"loss": mean(1.0)})
            step.finish(BATCH)
    assert told.saved == [3]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_step_whose_worker_is_lost_in_the_evaluation_is_left_to_recovery(tmp_path):
    told = Told()
    steps = make(tmp_path, told, evaluate_every=1)

    def evaluate(step):
        raise WorkerLost("generator", 0, "generate", "killed by signal 9")

    steps._sinks = evolve(told.sinks(), evaluate=evaluate)
    with pytest.raises(WorkerLost):
        for step in steps:
            step.finish(BATCH)
    assert (told.saved, steps.done) == ([], 0)


@pytest.mark.parametrize("known", [0.0, 1800.0])
def test_the_time_of_an_evaluation_counts_before_a_limit(tmp_path, monkeypatch, known):
    """Steps of 60 s, an evaluation of 1800 s after the last of them, and 1320 s from the first step to the limit."""
    now = [1e6]
    clock = SimpleNamespace(time=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr("whet.run.steps.time", clock)
    told = Told()
    steps = make(tmp_path, told, steps=20)
    steps.log_start({}, known)
    steps.end_by(now[0] + 1320, "the job ends")
    for step in steps:
        now[0] += 60
        step.finish(BATCH)
    assert told.saved[-1] == (19 if known else 20)
    assert told.evaluated == ([] if known else [20])


def test_a_loop_that_is_left_between_two_steps_is_saved_and_within_a_step_is_not(tmp_path):
    for within, saved in ((False, [2]), (True, [])):
        told = Told()
        steps = make(tmp_path / str(within), told)
        for step in steps:
            if within and step.number == 3:
                break
            step.finish(BATCH)
            if not within and step.number == 2:
                break
        steps.leave()
        assert told.saved == saved


def test_a_signal_waits_for_the_end_of_a_step_whose_weights_have_changed(tmp_path):
    told, waited = Told(), []
    steps = make(tmp_path, told)
    for step in steps:
        if step.number == 2:
            steps.weights_change()
        with steps.interruptible():
            if step.number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            waited.append(step.number)
        step.finish(BATCH)
    assert waited == [1, 2]
    assert told.saved == [2], "not the weights of half a step under the number of the step before"
