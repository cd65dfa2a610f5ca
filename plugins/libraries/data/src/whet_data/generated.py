"""Tasks of an environment that are generated: item i is computed from a seed and i, and nothing is kept."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import overload

from whet.data.records import Task


class GeneratedTasks(Sequence[Task]):
    """A sequence of `count` tasks. Each one is made on access, by `make(position)`."""

    def __init__(self, count: int, make: Callable[[int], Task]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        positions = range(self._count)[index]
        return self._make(positions) if isinstance(positions, int) else [self._make(i) for i in positions]


def held_out(text: str) -> bool:
    """Return whether a generated task is held out for the split `test`, by the hash of its text. One in ten is."""
    return blake2b(text.encode(), digest_size=2).digest()[0] % 10 == 0
