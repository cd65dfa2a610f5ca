"""Stand-ins for the parts of an algorithm. They record every call in order, so that a test sees the loop."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from whet.component import Spec
from whet.data.batch import Batch
from whet.data.files import json_line
from whet.data.metrics import Metric
from whet.errors import PluginError
from whet.interfaces.state import stored
from whet.run.steps import Step
from whet_testing.batches import random_batch
from whet_testing.fakes import Done, FakeBackend

ROLLOUT_COLUMNS = ("sampler_logprobs", "version", "temperature", "env", "reward", "stopped")
"""Columns of a batch of rollouts beside the base columns."""


@frozen
class Event:
    """One call that the algorithm made."""

    name: str
    """Name of the call, such as `take`, `train`, `sync_weights` or `finish`."""
    step: int
    """Number of the step under way; 0 before the first step."""
    batch: Batch | None = None
    value: Any = None
    weights: str = ""
    """Of a call of `score`: the set of weights."""


@define
class Watch:
    """The calls of an algorithm so far."""

    events: list[Event] = field(factory=list)
    step: int = 0
    states: dict[int, dict[str, Any]] = field(factory=dict)
    """The algorithm's state after each finished step, by the number of the step."""
    roles: "dict[str, Watch]" = field(factory=dict)
    """The calls of further models, by role."""

    def note(self, name: str, batch: Batch | None = None, value: Any = None, weights: str = "") -> None:
        """Record a call."""
        self.events.append(Event(name, self.step, batch, value, weights))

    def named(self, name: str) -> list[Event]:
        """Return the calls of one name."""
        return [event for event in self.events if event.name == name]


class WatchedSteps:
    """The steps after step `done`, up to and including step `steps`."""

    def __init__(self, watch: Watch, steps: int, done: int = 0, state: Mapping[str, Any] | None = None) -> None:
        self._watch, self._last, self.done = watch, steps, done
        self.metrics: list[Mapping[str, Metric]] = []
        self.state: dict[str, Any] = dict(state or {})

    def __iter__(self) -> Iterator[Step]:
        while self.done < self._last:
            number = self._watch.step = self.done + 1
            yield Step(number, 1000 + number, self)  # type: ignore[arg-type]
            if self.done != number:
                raise AssertionError(f"step {number} was not finished: the algorithm must call step.finish(batch)")

    def is_last(self, number: int) -> bool:
        """Return whether no step follows this step."""
        return number >= self._last

    def stop(self) -> None:
        """End the loop after the current step."""
        self._last = self.done + 1

    def log_start(self, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics from before the first step."""
        self._watch.note("start", value=metrics)

    def publish(self, name: str, event: Any) -> None:
        """Record a table of a step. Raises `PluginError` for rows that a run could not write."""
        for row in event.rows:
            _check_row(event.name, row)
        self._watch.note("table", value=event)

    def finish(self, step: Step, metrics: Mapping[str, Metric], batch: Batch) -> None:
        """Record the call, the state and the metrics of a finished step.

        Raises `PluginError` for what is no batch, a state that JSON would change, and metrics that are no numbers.
        """
        if not isinstance(batch, Batch):
            raise PluginError(f"step.finish got {batch!r:.60}, wanted the batch of the step")
        for name, metric in metrics.items():
            _check_metric(name, metric)
        self._watch.note("finish", batch, step.number)
        kept = {key: stored(f"steps.state[{key!r}]", {key: value})[key] for key, value in self.state.items()}
        self._watch.states[step.number] = kept
        self.metrics.append(dict(metrics))
        self.done = step.number


class WatchedBackend(FakeBackend):
    """A fake backend that records its calls."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, Metric]:
        """Record the call, and train as `FakeBackend` does."""
        self._watch.note("train", batch, loss)
        return super().train(batch, loss, count_over)

    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Any = "policy") -> dict[str, Any]:
        """Record the call, and score as `FakeBackend` does."""
        self._watch.note("score", batch, outputs, weights)
        return super().score(batch, outputs, weights)

    def sleep(self) -> None:
        """Record the call."""
        self._watch.note("sleep")

    def wake(self) -> None:
        """Record the call."""
        self._watch.note("wake")

    def save(self, folder: Path) -> Done:
        """Record the call, and save as `FakeBackend` does."""
        self._watch.note("save")
        return super().save(folder)


class WatchedRollouts:
    """A source of random groups. The groups of a step do not depend on the groups of earlier steps."""

    def __init__(self, watch: Watch, group_size: int, greedy: bool = False) -> None:
        self._watch, self._group_size = watch, group_size
        self._columns = (*ROLLOUT_COLUMNS, "greedy_reward") if greedy else ROLLOUT_COLUMNS

    def take(self, groups: int) -> Batch:
        """Return a batch of `groups` groups."""
        batch = random_batch(
            self._watch.step,
            columns=self._columns,
            sequences=groups * self._group_size,
            group_size=self._group_size,
        )
        self._watch.note("take", batch, groups)
        return batch


def _check_row(table: str, row: Any) -> None:
    """Raise `PluginError` unless a row of a table is a mapping of builtins."""
    who = f"step.table({table!r}) has the row {row!r:.200}"
    if not isinstance(row, Mapping):
        raise PluginError(f"{who}; wanted a mapping of column names to builtins")
    for name, value in row.items():
        try:
            json_line({name: value})
        except (TypeError, ValueError) as error:
            words = "wanted builtins: write int(...), float(...) or .tolist()"
            raise PluginError(f"{who}, in which {name!r} is {value!r:.60}; {words}") from error


def _check_metric(name: str, metric: Metric) -> None:
    """Raise `PluginError` unless a metric becomes a number under a free name."""
    if name in ("step", "time"):
        raise PluginError(f"a metric is named {name!r}, a key of every row in metrics.jsonl; rename it")
    try:
        metric.number()
    except (TypeError, ValueError) as error:
        found = f"step.log: {name} is a {metric.kind} of {metric.value!r:.60}"
        raise PluginError(f"{found}, wanted one number: write float(values.sum()), and len(values) as count") from error


def watched_sync(watch: Watch) -> Callable[..., None]:
    """Return a function `sync_weights` that records its calls."""

    def sync_weights(*, version: int) -> None:
        watch.note("sync_weights", value=version)

    return sync_weights
