"""The contract of a logger: it runs on the driver and sees only plain numbers."""

from collections.abc import Mapping
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


@runtime_checkable
class Logger(Protocol):
    """Receives the metrics of each step. The component's target is called as `target(config, run)`.

    Methods are called in order, on the driver.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Step 0 is the evaluation before the first step."""
        ...

    def status(self, text: str) -> None:
        """Show what the run is waiting for, e.g. "rollouts, 91 of 128 episodes finished". Most loggers ignore it."""
        ...

    def rewind(self, step: int) -> None:
        """Discard what was logged for steps after `step`; -1 discards everything.

        Called after workers were lost, before the run repeats these steps.
        """
        ...

    def close(self, failed: bool) -> None:
        """Finish: flush, print a summary, draw. Safe to call twice."""
        ...
