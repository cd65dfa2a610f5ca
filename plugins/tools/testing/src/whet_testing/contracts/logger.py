"""The rules that every logger must keep.

    class TestJsonl(LoggerContract):
        def make(self, run: RunInfo) -> JsonlLogger:
            return JsonlLogger(JsonlConfig(), run)

        def read(self, folder: Path) -> list[tuple[int, dict[str, float]]]:
            return [(row.pop("step"), row) for row in read_rows(folder / "metrics-log.jsonl")]

`read` returns (step, metrics) in the order written. It proves that a resumed run loses no step and repeats none.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.interfaces.logger import Event, Logger, RunInfo
from whet.interfaces.state import check_ran, states
from whet_testing.deadline import deadline

Rows = list[tuple[int, dict[str, float]]]
HOSTILE_NAMES = (
    "../../outside", "/outside", "a/../../../outside", "C:\\outside", "outside\0", "", " ", "/", ".", "name " * 200,
    "%s %d %n", "{0} {name!r}", "[bold]x[/bold] [/]", "a\nb\rc\td", "\x1b[2J\x1b]0;title\x07", "<b>&amp;", "名前",
    "a.b", "'\"`;",
)  # fmt: skip


class LoggerContract:
    """Inherit this class and override `make`. Override `read` too where the logger writes files."""

    def make(self, run: RunInfo) -> Logger:
        """Build the logger under test."""
        raise NotImplementedError("override `make` to build the logger")

    def read(self, folder: Path) -> Rows | None:
        """Return the written (step, metrics) in order, or None if nothing can be read back."""
        return None

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunInfo:
        """Return a fresh run of four steps. Its folder is inside of `tmp_path`."""
        folder = tmp_path / "runs" / "it"
        folder.mkdir(parents=True)
        return RunInfo(folder, "it", {"run": {"steps": 4}, "algorithm": {"use": "made-up"}}, steps=4)

    def test_it_is_a_logger(self, run: RunInfo) -> None:
        logger = self.make(run)
        assert isinstance(logger, Logger)
        logger.close(failed=False)

    def test_its_methods_are_not_async(self, run: RunInfo) -> None:
        logger: Any = self.make(run)
        check_ran(logger.status("starting"), "`status`")
        check_ran(logger.log(1, _numbers(1)), "`log`")
        if hasattr(logger, "event"):
            check_ran(logger.event(Event("saved", 1, details={"step": 1})), "`event`")
        check_ran(logger.rewind(0), "`rewind`")
        check_ran(logger.close(failed=False), "`close`")

    def test_a_state_is_stored_and_loaded(self, run: RunInfo) -> None:
        logger = self.make(run)
        logger.log(1, _numbers(1))
        saved = states({"the logger": logger})
        logger.close(failed=True)
        if not saved:
            pytest.skip("it has no state")
        again: Any = self.make(RunInfo(run.folder, run.name, run.config, run.steps, resumed_from=1))
        check_ran(again.load(saved["the logger"]), "`load`")
        again.close(failed=False)

    def test_a_whole_run_is_logged(self, run: RunInfo) -> None:
        logger = self.make(run)
        logger.status("generator 0 %")
        for step in range(5):
            logger.log(step, _numbers(step))
            logger.status(f"step {step}")
        logger.close(failed=False)
        rows = self.read(run.folder)
        assert rows is None or [step for step, _ in rows] == [0, 1, 2, 3, 4]
        assert rows is None or dict(rows)[3]["loss"] == pytest.approx(0.25)

    def test_closing_twice_is_safe(self, run: RunInfo) -> None:
        logger = self.make(run)
        logger.log(1, _numbers(1))
        logger.close(failed=False)
        logger.close(failed=False)

    def test_a_run_that_failed_before_its_first_step_is_closed(self, run: RunInfo) -> None:
        logger = self.make(run)
        logger.status("starting")
        logger.close(failed=True)
        logger.close(failed=True)

    def test_a_run_that_failed_later_is_closed(self, run: RunInfo) -> None:
        logger = self.make(run)
        logger.log(1, _numbers(1))
        logger.close(failed=True)

    def test_what_was_logged_is_kept_when_the_run_is_killed(self, run: RunInfo) -> None:
        logger = self.make(run)
        logger.log(1, _numbers(1))
        rows = self.read(run.folder)
        logger.close(failed=True)
        assert rows is None or [step for step, _ in rows] == [1]

    def test_a_resumed_run_has_each_step_once(self, run: RunInfo) -> None:
        first = self.make(run)
        for step in (1, 2, 3):
            first.log(step, _numbers(step))
        first.close(failed=True)
        again = self.make(RunInfo(run.folder, run.name, run.config, run.steps, resumed_from=2))
        for step in (3, 4):
            again.log(step, _numbers(step))
        again.close(failed=False)
        rows = self.read(run.folder)
        assert rows is None or [step for step, _ in rows] == [1, 2, 3, 4]

    @pytest.mark.parametrize("step", [2, 0, -1])
    def test_a_run_whose_workers_were_lost_has_each_step_once(self, run: RunInfo, step: int) -> None:
        logger = self.make(run)
        for number in (0, 1, 2, 3):
            logger.log(number, _numbers(number))
        logger.rewind(step)
        for number in range(step + 1, 5):
            logger.log(number, _numbers(number))
        logger.close(failed=False)
        rows = self.read(run.folder)
        assert rows is None or [number for number, _ in rows] == [0, 1, 2, 3, 4]

    def test_events_do_no_harm_whatever_they_hold(
        self, run: RunInfo, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        logger = self.make(run)
        see: Callable[[Event], None] | None = getattr(logger, "event", None)
        if see is None:
            logger.close(failed=False)
            pytest.skip("this logger wants no events")
        hostile = [event for name in HOSTILE_NAMES for event in _events(name)]
        logger.log(1, _numbers(1))
        for event in [*hostile, *_events("fine")]:
            see(event)
        logger.log(2, _numbers(2))
        for event in reversed(_events("in another order, and of an earlier step")):
            see(event)
        logger.rewind(1)
        for event in _events("after a rewind"):
            see(event)
        logger.log(2, _numbers(2))
        logger.close(failed=False)
        rows = self.read(run.folder)
        assert rows is None or [step for step, _ in rows] == [1, 2]
        assert repr(hostile) == repr([event for name in HOSTILE_NAMES for event in _events(name)]), "an event changed"
        assert "\x1b[2J" not in "".join(capfd.readouterr()), "model output reached the terminal unescaped"
        outside = [path for path in tmp_path.rglob("*") if path.is_file() and run.folder not in path.parents]
        assert not outside, f"files were written outside of the run folder: {outside}"

    def test_numbers_that_are_not_finite_do_no_harm(self, run: RunInfo) -> None:
        logger = self.make(run)
        for step, number in enumerate([math.nan, math.inf, -math.inf, 1e308, -0.0, 5e-324], start=1):
            logger.log(step, {"loss": number, "reward/mean": number, "fine": 1.0})
        logger.close(failed=False)
        rows = self.read(run.folder)
        assert rows is None or [row["fine"] for _, row in rows] == [1.0] * 6

    def test_metrics_may_come_and_go(self, run: RunInfo) -> None:
        logger = self.make(run)
        for step, metrics in enumerate([{"a": 1.0}, {}, {"b": 2.0}, {"a": 1.0, "b": 2.0}], start=1):
            logger.log(step, metrics)
        logger.close(failed=False)

    @pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name[:20]))
    def test_a_hostile_name_does_no_harm(
        self, run: RunInfo, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        logger = self.make(run)
        logger.log(1, {name: 1.0, f"evaluation/{name}/reward": 0.5, "loss": 1.0})
        logger.status(f"waiting for {name}")
        logger.close(failed=False)
        outside = [path for path in tmp_path.rglob("*") if path.is_file() and run.folder not in path.parents]
        assert not outside, f"files were written outside of the run folder: {outside}"
        shown = "".join(capfd.readouterr())
        assert "\x1b[2J" not in shown, "the metric's name reached the terminal unescaped"
        assert "\x1b]0;" not in shown, "the metric's name reached the terminal unescaped"

    def test_the_metrics_are_left_as_they_were(self, run: RunInfo) -> None:
        logger, metrics = self.make(run), _numbers(1)
        logger.log(1, metrics)
        logger.close(failed=False)
        assert metrics == _numbers(1)

    def test_numpy_numbers_are_numbers(self, run: RunInfo) -> None:
        logger = self.make(run)
        logger.log(1, {"loss": np.float64(1.0), "reward/mean": float(np.float32(0.5))})
        logger.close(failed=False)

    def test_many_metrics_do_not_hold_the_run_up(self, run: RunInfo) -> None:
        with deadline(20, "logging 100 steps of 100 metrics"):
            logger = self.make(run)
            for step in range(1, 101):
                logger.log(step, {f"part/metric-{i}": i / step for i in range(100)})
            logger.close(failed=False)


def _events(text: str) -> list[Event]:
    """Return events as a run sends them, with model output that may be anything; the last kind is made up."""
    message = {"role": "assistant", "content": text}
    episode = {
        "group": 0, "environment": "sums", "task": 3, "id": "", "sample": 0, "reward": 0.5, "rewards": {text: 0.5},
        "turns": 1, "response_length": 4, "stop": "stop", "versions": [0, 0], "advantage": None, "messages": [message],
    }  # fmt: skip
    histogram = {"step": 1, "name": text, "edges": [-1.0, 0.0, 1.0], "counts": [0, 2, 0, 1]}
    figures = {"reward": {"value": 0.5, "ci_low": None, "ci_high": None, "standard_error": None, "tasks": 1}}
    return [
        Event("opened", 0, details={"after_step": 0, "steps": 4, "process": 1}),
        Event("evaluation", 1, "sums", {"split": "test", "figures": figures, "missing": {}}, [episode]),
        Event("histograms", 1, rows=[histogram]),
        Event("table", 1, "worst", rows=[{"task": 3, "text": text}, {"task": 4, "score": math.nan}, {}]),
        Event("table", 1, "nothing"),
        Event("rollouts", 1, rows=[episode, {**episode, "sample": 1}]),
        Event("saved", 1, details={"step": 1}),
        Event("group dropped", details={"group": 7, "environment": "sums", "task": 3, "cause": text}),
        Event("replica restarted", details={"role": "generator", "rank": 0, "cause": text, "left": 2}),
        Event("rewound", 1, details={"after_step": 1}),
        Event("made up", details={"why": text}),
    ]


def _numbers(step: int) -> dict[str, float]:
    return {"loss": 1 / (1 + step), "lr": 1e-6, "reward/mean": 0.1 * step, "tokens": 1000.0, "seconds/step": 0.5}
