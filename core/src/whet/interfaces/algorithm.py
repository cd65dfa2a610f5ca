"""The contract of an algorithm: a loop that fits on a page, and its parts, which are everything that the loop gets.

    OnlineParts     of an algorithm that trains on rollouts
    OfflineParts    of an algorithm that trains on data files

An algorithm never learns which backend, generator or launcher stands behind its parts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from attrs import frozen

from whet.component import Selection, Spec
from whet.config.build import build_selection

if TYPE_CHECKING:
    from whet.config.sections import Config
    from whet.data.batch import Batch
    from whet.data.chat import ChatTokenizer
    from whet.data.metrics import Metric
    from whet.interfaces.backend import Backend
    from whet.interfaces.data import OfflineData
    from whet.interfaces.generator import Generator


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
        """Add metrics to this step. Metrics of the same name are merged by their kind."""
        ...

    def due(self, every: int) -> bool:
        """Return whether an action that is due every `every` steps, and after the last step, is due now.

        With `every` 0 it is due after the last step only.
        """
        ...

    def finish(self, batch: "Batch") -> None:
        """End the step: write metrics, evaluate, call loggers and hooks, and save a checkpoint when one is due."""
        ...


class Steps(Protocol):
    """Iterates over the remaining steps. Each step that the iterator yields must be finished."""

    total: int
    """Number of steps of the whole run."""
    state: dict[str, Any]
    """State that an algorithm carries from step to step beside weights. Only builtins, which JSON keeps to the last
    bit. Each checkpoint saves it, and a resumed run finds it here."""
    done: int
    """Number of steps finished so far, earlier attempts included."""

    stopped_by: int | None
    """The signal that ended the loop early; None: no signal did."""

    def __iter__(self) -> "Iterator[Step]": ...

    def is_last(self, number: int) -> bool:
        """Return whether `number` is the last step."""
        ...

    def save_now(self) -> None:
        """Save a checkpoint of the last finished step, unless one exists already."""
        ...

    def log_start(self, metrics: "Mapping[str, Metric]") -> None:
        """Add metrics of the model before training. They are the row of step 0."""
        ...


class Rollouts(Protocol):
    """The rollouts of a run."""

    def take(self, groups: int) -> "Batch":
        """Wait for `groups` groups that pass the filters, and return their batch."""
        ...


@frozen(kw_only=True)
class Parts:
    """What every algorithm gets, ready to use."""

    config: "Config"
    algorithm: "Algorithm[Any]"
    hooks: Any
    """Calls a hook of all plugins, e.g. `parts.hooks.whet_run(algorithm=..., parts=...)`."""
    backend: "Backend"
    roles: "Mapping[str, Backend]"
    """Further models, by the role names that the algorithm's facts ask for."""
    generator: "Generator | None"
    chat: "ChatTokenizer"
    loss: Spec
    """The algorithm's loss, in the form in which it is sent to the backend's workers."""
    sync_weights: Callable[..., None]
    """`sync_weights(version=n)` sends the backend's weights to the generator."""
    steps: "Steps"
    """Iterate over it to get the remaining steps."""
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


@frozen(kw_only=True)
class OnlineParts(Parts):
    """What an algorithm gets that trains on rollouts."""

    generator: "Generator"
    rollouts: "Rollouts"
    """`take(n)` returns a batch of n groups."""


@frozen(kw_only=True)
class OfflineParts(Parts):
    """What an algorithm gets that trains on data files."""

    data: "OfflineData"


Wanted = TypeVar("Wanted", bound=Parts, contravariant=True)


@runtime_checkable
class Algorithm(Protocol[Wanted]):
    """The component's target is called as `target(config)`; `run` owns the optimizer steps.

    `Wanted` is `OnlineParts` where the facts say that it trains on `rollouts`, else `OfflineParts`.
    """

    def run(self, parts: Wanted) -> None:
        """Run from the first step of `parts.steps` to the last."""
        ...
