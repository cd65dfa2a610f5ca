"""The contract of a logger: it runs on the driver and sees plain numbers, and events if it wants them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from attrs import field, frozen


@frozen
class RunInfo:
    """What a logger may know about the run."""

    folder: Path
    """The run folder."""
    name: str
    """The name of the run folder, without its path."""
    config: Mapping[str, Any] = field(factory=dict)
    """The whole config as builtins."""
    steps: int = 0
    """Number of steps of the whole run."""
    resumed_from: int = 0
    """The step after which this run continues; 0 for a new run."""


@frozen
class Event:
    """Something that happened in a run. The run folder keeps all of it. Kinds to come are to be ignored.

    rollouts      rows: the first 64 episodes of a step, see `rollouts/`; alone sent after the `log` of their step
    evaluation    name: environment; details: its numbers; rows: its episodes
    histograms    rows: name, edges [K], counts [K + 1]: below the first edge, between two edges, from the last edge up
    table         name and rows that an algorithm logged with `step.table`

    Each line of the journal is an event too, with its details: `opened` (a resume has `after_step` above 0), `rewound`,
    `saved`, `failed`, `group dropped`, `replica restarted`, `run restarted`, `watcher failed` (a logger or a hook) ...
    """

    kind: str
    step: int | None = None
    name: str = ""
    details: Mapping[str, Any] = field(factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()


@runtime_checkable
class Logger(Protocol):
    """Receives the metrics of each step. The component's target is called as `target(config, run)`.

    Methods are called in order, on the driver. A logger may also have `event(self, event: Event) -> None`; an event
    reaches it before the next call of another method.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Step 0 is the evaluation before the first step."""

    def status(self, text: str) -> None:
        """Show what the run is waiting for, e.g. "rollouts, 91 of 128 episodes finished". Most loggers ignore it."""

    def rewind(self, step: int) -> None:
        """Discard what was logged for steps after `step`; -1 discards everything.

        Called after workers were lost, before the run repeats these steps.
        """

    def close(self, failed: bool) -> None:
        """Finish: flush, print a summary, draw. Safe to call twice."""
