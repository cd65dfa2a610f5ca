"""The contract of an algorithm: a training loop, and the parts that the loop receives.

    OnlineParts     for an algorithm that trains on rollouts
    OfflineParts    for an algorithm that trains on data files

The loop receives nothing but its parts. An algorithm never learns which backend, generator or launcher implements them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from attrs import frozen

from whet.component import Selection, Spec
from whet.config.build import build_selection

if TYPE_CHECKING:
    from whet.config.sections import Config
    from whet.data.batch import Batch
    from whet.data.metrics import Metric
    from whet.interfaces.backend import Backend
    from whet.interfaces.chat import Tokenizer
    from whet.interfaces.data import OfflineData
    from whet.interfaces.generator import Generator


class Step(Protocol):
    """One step of a run."""

    @property
    def number(self) -> int:
        """Return the number of the step, counted from 1."""

    @property
    def seed(self) -> int:
        """Return the seed of this step. All randomness of the step is derived from this seed."""

    def log(self, metrics: "Mapping[str, Metric]") -> None:
        """Add metrics to this step. Metrics of the same name are merged by their kind."""

    def table(self, name: str, rows: "Sequence[Mapping[str, Any]]") -> None:
        """Log rows of builtins under a name: loggers show them as a table, and `tables/` of the run folder keeps them.

        Raises `ValueError` if the name is not made of letters, digits, - and _.
        """

    def due(self, every: int) -> bool:
        """Return whether an action is due after this step.

        The action is due every `every` steps and after the last step. With `every` 0, it is due after the last step
        only.
        """

    def finish(self, batch: "Batch") -> None:
        """End the step: write metrics, evaluate, call loggers and hooks, and save a checkpoint if one is due."""


class Steps(Protocol):
    """The remaining steps of a run, as an iterable. The algorithm must finish each step that the iterator yields."""

    total: int
    """Number of steps of the whole run."""
    state: dict[str, Any]
    """State that an algorithm carries from step to step, apart from weights. All values are builtins that JSON stores
    exactly. Each checkpoint saves this state, and a resumed run restores it."""
    done: int
    """Number of steps finished so far, including earlier attempts of the run."""

    stopped_by: int | None
    """Number of the signal that ended the loop early. None: no signal ended the loop."""

    def __iter__(self) -> "Iterator[Step]": ...

    def is_last(self, number: int) -> bool:
        """Return whether `number` is the last step."""

    def stop(self) -> None:
        """End the loop after the current step, and save it, as SIGTERM does. The same command continues the run."""

    def end_by(self, moment: float, why: str) -> None:
        """End the loop as `stop` does, before a step after which a save would end later than `moment`.

        `moment` is in seconds since the epoch; of several moments the nearest counts. `why` names the reason on stderr,
        e.g. "the job's time limit is reached".
        """

    def save_now(self) -> None:
        """Save a checkpoint of the last finished step, unless one exists already. Wait until it is durable."""

    def leave(self) -> None:
        """Save the last finished step after a loop that was left early, unless a further step has begun."""

    def log_start(self, metrics: "Mapping[str, Metric]", seconds: float = 0.0) -> None:
        """Add metrics of the model before training. The metrics file has them in the row of step 0.

        `seconds`: how long it took to evaluate it, which tells how long a later evaluation will take.
        """


class Rollouts(Protocol):
    """The rollouts of a run."""

    def take(self, groups: int) -> "Batch":
        """Wait for `groups` groups that pass the filters, and return them as one batch."""


@frozen(kw_only=True)
class Parts:
    """The parts that every algorithm receives, ready to use."""

    config: "Config"
    algorithm: "Algorithm[Any]"
    hooks: Any
    """Hooks by name. Calling a hook calls it in all plugins, e.g. `parts.hooks.whet_run(algorithm=..., parts=...)`."""
    backend: "Backend"
    roles: "Mapping[str, Backend]"
    """Backends of further models, by role name. The algorithm's facts list these roles."""
    generator: "Generator | None"
    chat: "Tokenizer"
    loss: Spec
    """The algorithm's loss, in a form that can be sent to the backend's workers."""
    sync_weights: Callable[..., None]
    """`sync_weights(version=n)` sends the backend's weights to the generator."""
    steps: "Steps"
    """The remaining steps: `for step in parts.steps`."""
    evaluate: Callable[[int], "Mapping[str, Metric]"]
    """`evaluate(step)` evaluates on the environments of the config's `evaluation`."""
    seed: int
    keep: Callable[[Selection, Any], Any] = lambda selection, component: component
    """Saves the state of a component with each checkpoint, and returns the component; see `whet.interfaces.state`."""

    def build(self, selection: Selection) -> Any:
        """Build a component that runs on the driver, e.g. an advantage estimator.

        If the component has a state, each checkpoint saves the state, and a resumed run continues from it.
        """
        return self.keep(selection, build_selection(selection))


@frozen(kw_only=True)
class OnlineParts(Parts):
    """The parts of an algorithm that trains on rollouts."""

    generator: "Generator"
    rollouts: "Rollouts"
    """`take(n)` returns a batch of n groups."""


@frozen(kw_only=True)
class OfflineParts(Parts):
    """The parts of an algorithm that trains on data files."""

    data: "OfflineData"


Wanted = TypeVar("Wanted", bound=Parts, contravariant=True)


@runtime_checkable
class Algorithm(Protocol[Wanted]):
    """A training loop. The component's target is called as `target(config)`; `run` decides on all optimizer steps.

    `Wanted` is the type of the parts: `OnlineParts` if the algorithm's facts have `rollouts` among the inputs, else
    `OfflineParts`.
    """

    def run(self, parts: Wanted) -> None:
        """Run from the first step of `parts.steps` to the last."""
