"""The contract of loggers holds for good ones, and each rule catches one that breaks it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.errors import PluginError
from whet.interfaces.logger import Event, RunInfo
from whet_testing.contracts.logger import LoggerContract, Rows
from whet_testing.fakes import MemoryLogger


class FileLogger(MemoryLogger):
    """Keeps everything in one JSON file."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__()
        self._file = run.folder / "rows.json"
        if run.resumed_from:
            self.rows = [row for row in read_rows(self._file) if row[0] <= run.resumed_from]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        self._file.write_text(json.dumps(self.rows), encoding="utf-8")


def read_rows(file: Path) -> Rows:
    return [(step, row) for step, row in json.loads(file.read_text(encoding="utf-8"))]


class Files(LoggerContract):
    def make(self, run: RunInfo) -> Any:
        return FileLogger(run)

    def read(self, folder: Path) -> Rows:
        return read_rows(folder / "rows.json")


class TestOfALoggerThatWrites(Files):
    pass


class TestOfALoggerThatRemembers(LoggerContract):
    def make(self, run: RunInfo) -> MemoryLogger:
        return MemoryLogger()


class StartsAnew(FileLogger):
    def __init__(self, run: RunInfo) -> None:
        super().__init__(RunInfo(run.folder, run.name))


class Doubles(FileLogger):
    def __init__(self, run: RunInfo) -> None:
        super().__init__(RunInfo(run.folder, run.name, resumed_from=99 if run.resumed_from else 0))


class NeverRewinds(FileLogger):
    def rewind(self, step: int) -> None:
        pass


class WritesAtTheEnd(FileLogger):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.touch()
        MemoryLogger.log(self, step, metrics)


class ClosesOnce(FileLogger):
    def close(self, failed: bool) -> None:
        assert self.failed is None
        super().close(failed)


class NeedsAStep(FileLogger):
    def close(self, failed: bool) -> None:
        self.rows[-1]


class Rounds(FileLogger):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {name: round(value) for name, value in metrics.items()})


class AddsToTheMetrics(FileLogger):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics["step"] = step  # type: ignore[index]


class FileForEachName(FileLogger):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in metrics:
            (self._file.parent / name).write_text("")


class Prints(FileLogger):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        print(*metrics)


MUTANTS: dict[type[FileLogger], str] = {
    StartsAnew: "test_a_resumed_run_has_each_step_once",
    Doubles: "test_a_resumed_run_has_each_step_once",
    NeverRewinds: "test_a_run_whose_workers_were_lost_has_each_step_once",
    WritesAtTheEnd: "test_what_was_logged_is_kept_when_the_run_is_killed",
    ClosesOnce: "test_closing_twice_is_safe",
    NeedsAStep: "test_a_run_that_failed_before_its_first_step_is_closed",
    Rounds: "test_numbers_that_are_not_finite_do_no_harm",
    AddsToTheMetrics: "test_the_metrics_are_left_as_they_were",
}


def run_in(folder: Path) -> RunInfo:
    (folder / "runs" / "it").mkdir(parents=True)
    return RunInfo(folder / "runs" / "it", "it")


@pytest.mark.parametrize(("kind", "rule"), MUTANTS.items())
def test_the_contract_catches(kind: type[FileLogger], rule: str, tmp_path: Path) -> None:
    contract = Files()
    contract.make = kind  # type: ignore[method-assign]
    more = {"step": 2} if kind is NeverRewinds else {}
    with pytest.raises((AssertionError, ValueError, IndexError, OverflowError)):
        getattr(contract, rule)(run_in(tmp_path), **more)


class KnowsAllKinds(FileLogger):
    def event(self, event: Event) -> None:
        {"rollouts": len, "evaluation": len, "histograms": len, "table": len, "saved": len}[event.kind](event.rows)


class ChangesEvents(FileLogger):
    def event(self, event: Event) -> None:
        for row in event.rows:
            row.pop("messages", None)  # type: ignore[attr-defined]


class WritesTablesByText(FileLogger):
    def event(self, event: Event) -> None:
        for row in event.rows if event.kind == "rollouts" else ():
            (self._file.parent / row["messages"][0]["content"]).write_text("")


class LogsTwice(FileLogger):
    def event(self, event: Event) -> None:
        if event.kind == "saved":
            self.log(event.step or 0, {})


@pytest.mark.parametrize("kind", [KnowsAllKinds, ChangesEvents, WritesTablesByText, LogsTwice])
def test_the_contract_catches_harm_at_events(
    kind: type[FileLogger], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    contract = Files()
    contract.make = kind  # type: ignore[method-assign]
    with pytest.raises((AssertionError, KeyError, OSError, ValueError)):
        contract.test_events_do_no_harm_whatever_they_hold(run_in(tmp_path), tmp_path, capfd)


@pytest.mark.parametrize(("kind", "name"), [(FileForEachName, "../../outside"), (Prints, "\x1b[2J\x1b]0;title\x07")])
def test_the_contract_catches_names_that_do_harm(
    kind: type[FileLogger], name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    contract = Files()
    contract.make = kind  # type: ignore[method-assign]
    with pytest.raises((AssertionError, OSError)):
        contract.test_a_hostile_name_does_no_harm(run_in(tmp_path), tmp_path, name, capfd)


class AsyncLog(FileLogger):
    async def log(self, step: int, metrics: Mapping[str, float]) -> None:  # type: ignore[override]
        super().log(step, metrics)


class AsyncStatus(FileLogger):
    async def status(self, text: str) -> None:  # type: ignore[override]
        pass


class AsyncEvent(FileLogger):
    async def event(self, event: Event) -> None:
        pass


class YieldsAtRewind(FileLogger):
    def rewind(self, step: int) -> Any:  # type: ignore[override]
        yield step


class AsyncClose(FileLogger):
    async def close(self, failed: bool) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("kind", "method"),
    [(AsyncLog, "log"), (AsyncStatus, "status"), (AsyncEvent, "event"), (YieldsAtRewind, "rewind"),
     (AsyncClose, "close")],
)  # fmt: skip
def test_the_contract_names_a_method_that_would_do_nothing(kind: type[FileLogger], method: str, tmp_path: Path) -> None:
    contract = LoggerContract()
    contract.make = kind  # type: ignore[method-assign]
    words = rf"`{method}` did nothing: `{kind.__name__}.{method}` must neither be `async def` nor contain `yield`"
    with pytest.raises(PluginError, match=words):
        contract.test_its_methods_are_not_async(run_in(tmp_path))


class LastLoss(FileLogger):
    """Remembers the last loss over a resume."""

    last: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        self.last = metrics.get("loss", self.last)

    def state(self) -> dict[str, Any]:
        return {"last": self.last}

    def load(self, state: Mapping[str, Any]) -> None:
        self.last = state["last"]


class TestOfALoggerWithAState(Files):
    def make(self, run: RunInfo) -> Any:
        return LastLoss(run)


class KeepsNumPy(LastLoss):
    def state(self) -> dict[str, Any]:
        return {"last": np.float32(self.last)}


class LoadsAsync(LastLoss):
    async def load(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        pass


class OnlyKeeps(FileLogger):
    def state(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (KeepsNumPy, "gave what JSON cannot store: Object of type float32"),
        (LoadsAsync, "`load` did nothing: `LoadsAsync.load` must neither be `async def`"),
        (OnlyKeeps, "has the method `state` and no `load`"),
    ],
)
def test_the_contract_says_what_is_wrong_with_a_state(kind: type[FileLogger], words: str, tmp_path: Path) -> None:
    contract = LoggerContract()
    contract.make = kind  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=words):
        contract.test_a_state_is_stored_and_loaded(run_in(tmp_path))
