"""The contract of an algorithm: a loop that fits on a page, and `Parts`, which is all that the loop gets.

An algorithm never learns which backend, generator or launcher stands behind its parts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

from whet.component import Selection, Spec
from whet.config.build import build_selection

if TYPE_CHECKING:
    from whet.config.sections import Config
    from whet.data.batch import Batch
    from whet.data.chat import ChatTokenizer
    from whet.data.metrics import Metric
    from whet.data.offline import OfflineData
    from whet.interfaces.backend import Backend
    from whet.interfaces.generator import Generator


@runtime_checkable
class Algorithm(Protocol):
    """The component's target is called as `target(config)`; `run` owns the optimizer steps."""

    def run(self, parts: "Parts") -> None:
        """Run from `parts.steps`' first step to its last."""
        ...


class Step(Protocol):
    """One step of a run."""

    @property
    def number(self) -> int:
        """Return the number of the step, counted from 1."""
        ...

    @property
    def seed(self) -> int:
        """Return the seed that this step's randomness is derived from."""
        ...

    def log(self, metrics: "Mapping[str, Metric]") -> None:
        """Add metrics; those of one name are merged by their kind."""
        ...

    def due(self, every: int) -> bool:
        """Return whether something that happens every so many steps, and after the last, happens now. 0: only last."""
        ...

    def finish(self, batch: "Batch") -> None:
        """End the step: write metrics, evaluate, tell loggers and hooks, save when due."""
        ...


class Steps(Protocol):
    """Iterates over the steps that are left. A step that was begun must be finished."""

    total: int
    """Steps of the run in all."""
    state: dict[str, Any]
    """What an algorithm carries from step to step beside weights: builtins, which JSON keeps to the last bit. Saved
    with each checkpoint, and there again when the run resumes from it."""
    done: int
    """Steps finished so far, those of earlier attempts included."""

    stopped_by: int | None
    """Signal that ended the loop early."""

    def __iter__(self) -> "Iterator[Step]": ...

    def is_last(self, number: int) -> bool:
        """Return whether no step follows this one."""
        ...

    def save_now(self) -> None:
        """Save the last finished step, unless that is done."""
        ...

    def log_start(self, metrics: "Mapping[str, Metric]") -> None:
        """Add metrics of the model as it comes, before the first step: they are the row of step 0."""
        ...


class Rollouts(Protocol):
    """The rollouts of a run."""

    def take(self, groups: int) -> "Batch":
        """Wait for this many groups that pass the filters, and return their batch."""
        ...


@frozen
class Parts:
    """The parts of a run, ready to use."""

    config: "Config"
    algorithm: "Algorithm"
    hooks: Any
    """Calls hooks of all plugins, e.g. `parts.hooks.whet_run(algorithm=..., parts=...)`."""
    backend: "Backend"
    roles: "Mapping[str, Backend]"
    """Further models, by the names that the algorithm's facts ask for."""
    generator: "Generator | None"
    chat: "ChatTokenizer"
    loss: Spec
    """The algorithm's loss, as it travels to the backend's workers."""
    rollouts: "Rollouts | None"
    """Of algorithms fed by rollouts: `take(n)` gives a batch of n groups."""
    data: "OfflineData | None"
    """Of algorithms fed by data files."""
    sync_weights: Callable[..., None]
    """`sync_weights(version=n)` sends the backend's weights to the generator."""
    steps: "Steps"
    """Iterate over it: the steps that are left."""
    evaluate: Callable[[int], "Mapping[str, Metric]"]
    """`evaluate(step)` evaluates on the environments of the config's `evaluation`."""
    seed: int

    @property
    def refit(self) -> Callable[..., None]:
        """Return `sync_weights`: its name of before, for one version."""
        return self.sync_weights

    def build(self, selection: Selection) -> Any:
        """Build a component that runs on the driver, e.g. an advantage estimator."""
        return build_selection(selection)
