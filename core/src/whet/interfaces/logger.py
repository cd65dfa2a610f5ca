"""The contract of a logger: it sees plain numbers on the driver."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from attrs import field, frozen


@frozen
class RunInfo:
    """What a logger may know of the run."""

    folder: Path
    """The run folder."""
    name: str
    """The folder's own name."""
    config: Mapping[str, Any] = field(factory=dict)
    """The whole config as plain builtins."""
    steps: int = 0
    """Steps the run will take in all."""
    resumed_from: int = 0
    """The step it continues after; 0 for a fresh run."""


@runtime_checkable
class Logger(Protocol):
    """Called in order on the driver. The component's target is called as `target(config, run)`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of a step; step 0 is the evaluation before the first."""
        ...

    def status(self, text: str) -> None:
        """Show what the run waits for, e.g. "rollouts, 91 of 128 episodes finished"; most loggers ignore it."""
        ...

    def rewind(self, step: int) -> None:
        """Forget what was logged of steps after this one: workers were lost, and the steps are taken again. -1: all."""
        ...

    def close(self, failed: bool) -> None:
        """Finish: flush, print a summary, draw. Safe to call twice."""
        ...
