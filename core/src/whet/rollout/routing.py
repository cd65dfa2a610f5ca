"""Which environment and which task come next: functions of the run's seed and of a few integers.

taken = (5, 2)          groups admitted so far, per environment
choose(weights, taken)  the environment that is furthest behind its share
shuffled(seed, 5, len)  the task at position 5; every pass over the tasks is another permutation
"""

from collections.abc import Callable, Sequence

from attrs import field, frozen

from whet.data.randomness import derive_seed
from whet.data.records import Sampling, Task
from whet.errors import DataError
from whet.interfaces.environment import Environment
from whet.rollout.scoring import Scoring


@frozen(eq=False)
class Route:
    """An environment as a run uses it."""

    name: str
    """Its name in metrics and records."""
    environment: Environment
    split: str
    weight: float = 1.0
    """For training: its share of all groups of the run, relative to the others."""
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

    def tasks(self) -> Sequence[Task]:
        """Return the tasks of the split. Raises `DataError` if there are none."""
        tasks = self.environment.tasks(self.split)
        if not len(tasks):
            raise DataError(f"environment {self.name!r} has no tasks in its split {self.split!r}")
        return tasks


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
