"""Optimizer state that lives in host memory, and comes to the device bucket by bucket while the optimizer steps.

    device    weights, gradients         | bucket 1 |  bucket 2  | ...       moments, and masters beside a bfloat16 copy
    host      everything else            ^ copy in, step, copy back ^

Why not FSDP2's `CPUOffloadPolicy`: it moves weights for every micro-batch, in both directions, and steps on the host's
processor. Here the traffic is that of one step, however many micro-batches it has, the device computes it with the same
kernels, so the numbers are bitwise those without, and it works on one rank and for every optimizer.

The tensors stay the same objects with an empty storage. No code may read or write one while it is away.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from attrs import define, field
from torch import Tensor, UntypedStorage

from whet_weights.offload import Slabs

BUCKET_BYTES = 256 << 20
"""Bytes of float32 weights of a bucket. A larger weight is a bucket of its own."""


@define(eq=False)
class Bucket:
    """Weights whose state comes and goes together."""

    names: tuple[str, ...]
    _tensors: Callable[[Sequence[str]], Iterable[Tensor]]
    """Returns the tensors of the state of some weights. Those of a weight that has taken no step do not exist."""
    _host: Slabs = field(factory=Slabs, init=False)
    _away: list[UntypedStorage] = field(factory=list, init=False)
    _sizes: list[int] = field(factory=list, init=False)

    @contextmanager
    def here(self) -> Iterator[tuple[str, ...]]:
        """Bring the state to the device. Whatever it is afterwards goes back to the host."""
        for storage, size in zip(self._away, self._sizes, strict=True):
            storage.resize_(size)
        self._host.give(self._away)
        self._away, self._sizes = [], []
        try:
            yield self.names
        finally:
            self.leave()

    def leave(self) -> None:
        """Move the state to the host."""
        found = {storage.data_ptr(): storage for storage in (t.untyped_storage() for t in self._tensors(self.names))}
        self._away = [storage for storage in found.values() if storage.nbytes()]
        self._sizes = [storage.nbytes() for storage in self._away]
        self._host.take(self._away)
        for storage in self._away:  # the copies come first: the device works in order
            storage.resize_(0)


def buckets(
    sizes: Iterable[tuple[str, int]], tensors: Callable[[Sequence[str]], Iterable[Tensor]], limit: int = BUCKET_BYTES
) -> list[Bucket]:
    """Return buckets of weights in order. `sizes`: each weight's name, and its bytes, the same on every rank."""
    found: list[list[str]] = []
    total = limit
    for name, size in sizes:
        if not found or total + size > limit:
            found.append([])
            total = 0
        found[-1].append(name)
        total += size
    made = [Bucket(tuple(names), tensors) for names in found]
    for one in made:
        one.leave()
    return made
