"""Which environment and which task come next: functions of the run's seed and of a few integers.

taken = (5, 2)          groups admitted so far, per environment
choose(weights, taken)  the environment that is furthest behind its share
weight_at(weights, 50)  a weight that changes with the steps, {0: 1, 100: 0.2} -> 0.6
shuffled(seed, 5, len)  the task at position 5; every pass over the tasks is another permutation
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from whet.data.randomness import derive_seed
from whet.data.records import Sampling, Task
from whet.errors import DataError, PluginError, WhetError, in_words
from whet.interfaces.environment import Environment
from whet.interfaces.state import check_ran
from whet.rollout.scoring import Scoring

logger = logging.getLogger(__name__)


@frozen(eq=False)
class Route:
    """An environment as a run uses it."""

    name: str
    """Its name in metrics and records."""
    environment: Environment
    split: str
    weight: float | Mapping[int, float] = 1.0
    """For training: its share of the groups, relative to the others, or its share by step; see `weight_at`."""
    group_size: int = 0
    """For training: number of samples of one task; 0: as the algorithm has it."""
    sampling: Callable[[Sampling], Sampling] = lambda usual: usual
    """Returns the sampling of this environment, from the sampling of all environments."""
    samples: int = 1
    """For evaluation: number of episodes for each task."""
    limit: int = 0
    """For evaluation: use only this many tasks, the first ones; 0: all tasks."""
    scoring: Scoring = field(factory=Scoring)
    """Scores to compute in addition to mean rewards. Training uses only the criterion of a pass."""
    given: set[str] = field(factory=set)
    """The names of the rewards that its episodes have had so far."""
    warned: set[str] = field(factory=set)
    """The warnings so far; all routes of a run share them."""

    def warn(self, words: str, more: str = "") -> None:
        """Log a warning about the environment, unless the run has logged one with the same words."""
        if (words := f"environment {self.name!r}: {words}") not in self.warned:
            self.warned.add(words)
            logger.warning("%s%s", words, more)

    def tasks(self) -> Sequence[Task]:
        """Return the tasks of the split. Raises `DataError` if there are none, `PluginError` for what is no task."""
        tasks: Any = self.environment.tasks(self.split)
        check_ran(tasks, f"`tasks` of environment {self.name!r}")
        if not len(tasks):
            raise DataError(f"environment {self.name!r} has no tasks in its split {self.split!r}")
        self.task(tasks, 0)
        return tasks  # type: ignore[no-any-return] # the check was of one task

    def task(self, tasks: Sequence[Task], position: int) -> Task:
        """Return one of the tasks. Raises `PluginError` if it cannot be read or is no task."""
        try:
            task: Any = tasks[position]
        except Exception as error:
            raise PluginError(f"task {position} of environment {self.name!r} failed: {in_words(error)}") from error
        if not isinstance(task, Task) or not isinstance(task.data, Mapping) or not isinstance(task.id, str):
            wanted = "Task(prompt), or Task(prompt, data, id) with a mapping and a text"
            raise PluginError(f"task {position} of environment {self.name!r} is {task!r:.200}, wanted {wanted}")
        return task

    def close(self) -> None:
        """Close the environment. If that fails, only warn: nothing depends on it any more."""
        try:
            check_ran(self.environment.close(), "it")  # type: ignore[func-returns-value] # a wrong one returns
        except Exception as error:
            logger.warning("environment %r could not be closed: %s", self.name, in_words(error))


def weight_at(weight: float | Mapping[int, float], step: int) -> float:
    """Return the weight after `step` finished steps. Between two steps of a schedule, it is interpolated linearly."""
    if not isinstance(weight, Mapping):
        return weight
    steps, weights = zip(*sorted(weight.items()), strict=True)
    return float(np.interp(step, steps, weights))


def idle_step(weights: Sequence[float | Mapping[int, float]]) -> int | None:
    """Return the first step after which no environment has a weight above 0. None: there is no such step."""
    steps = {0, *(step for weight in weights if isinstance(weight, Mapping) for step in weight)}
    return next((step for step in sorted(steps) if not any(weight_at(weight, step) for weight in weights)), None)


class Shares:
    """Chooses the environment of each group by weights that may change from step to step.

    With a schedule, each group adds the environment's present share to a sum, and the counts follow the sums. So new
    weights change only the groups after them. The sums depend on the steps at which groups were admitted. So a
    checkpoint holds the sums, and the environments of the groups ahead: a resumed run plays these groups again.
    """

    def __init__(self, weights: Sequence[float | Mapping[int, float]]) -> None:
        """Take weights. Raises `WhetError` if none is above 0 at some step."""
        if (step := idle_step(weights)) is not None:
            raise WhetError(
                f"of {len(weights)} environments none has a weight above 0 after step {step}; raise one's `weight`"
            )
        self._weights, self._ahead = tuple(weights), dict[int, int]()
        self._scheduled = any(isinstance(weight, Mapping) for weight in weights)
        self._sums = [0.0] * len(weights)

    def next(self, taken: Sequence[int], step: int) -> int:
        """Return the environment of the next group, after `step` finished steps."""
        if (known := self._ahead.pop(sum(taken), None)) is not None:
            return known
        weights = [weight_at(weight, step) for weight in self._weights]
        if self._scheduled:
            self._sums = [done + weight / sum(weights) for done, weight in zip(self._sums, weights, strict=True)]
            weights = [weight and done for done, weight in zip(self._sums, weights, strict=True)]
        return choose(weights, taken)

    def state(self, first: int, ahead: Mapping[int, int]) -> dict[str, Any]:
        """Return the state for a checkpoint; it is empty with constant weights.

        `ahead` maps each known group, counted over the run, to its environment. Groups before `first` are left out.
        """
        known = {**self._ahead, **ahead}
        ahead_in_order = [known[index] for index in sorted(known) if index >= first]
        return {"sums": self._sums, "ahead": ahead_in_order} if self._scheduled else {}

    def restore(self, state: Mapping[str, Any], taken: Sequence[int]) -> None:
        """Continue after `taken` groups of each environment."""
        self._sums = [float(done) for done in state.get("sums", taken)]
        self._ahead = dict(enumerate(state.get("ahead", ()), sum(taken)))


def choose(weights: Sequence[float], taken: Sequence[int]) -> int:
    """Return the environment that is furthest behind its share; of several, the first.

    The choice depends on the counts alone (Webster's method: smallest (taken + 1/2) / weight). So after any number of
    choices every count is near its share, and a resumed run continues as if it had never been interrupted.
    """
    return min((i for i, w in enumerate(weights) if w > 0), key=lambda i: ((taken[i] + 0.5) / weights[i], i))


def shuffled(seed: int, purpose: str, position: int, length: int) -> int:
    """Return the index at a position of an endless walk over `range(length)`. Each pass is its own permutation.

    It is computed for the position alone, without memory: a Feistel network over the smallest square of a power of two
    that holds the range, repeated until the result is in range (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains").
    """
    epoch, index = divmod(position, length)
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = derive_seed(seed, purpose, epoch)
    while True:
        left, right = index >> half, index & mask
        for round_ in range(4):
            left, right = right, left ^ (derive_seed(key, "round", round_, right) & mask)
        index = (left << half) | right
        if index < length:
            return index
