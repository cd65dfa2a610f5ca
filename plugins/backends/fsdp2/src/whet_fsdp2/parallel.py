"""How the ranks of a backend share one model: sizes of the parallel axes, and what divides what. Imports no torch.

    rank = (replica * shards + shard) * tensor + t          shards = data shards of a replica * context

    ranks 8, tensor 2, context 2, replicate 1     rank   0 1   2 3   4 5   6 7
                                                  data   0 0   0 0   1 1   1 1    another batch shard
                                                  context 0 0  1 1   0 0   1 1    another piece of each sequence
                                                  tensor 0 1   0 1   0 1   0 1    another part of each matrix

Weights are sharded by FSDP2 over all ranks of a replica that differ in data or context. Experts are laid over tensor
and shards: `expert` ranks in a row hold different experts.
"""

from collections.abc import Iterator

import attrs
from attrs import field, frozen

from whet.component import Problem
from whet.config.bounds import PROCESSES, between
from whet.data.model_info import ModelInfo
from whet.interfaces.axes import RankCoordinates

_SIZE = between(1, PROCESSES)


@frozen
class ParallelConfig:
    """Numbers of ranks along each axis. The ranks that are left are data parallel: FSDP2 shards weights over them."""

    tensor: int = field(default=1, validator=_SIZE)
    """Tensor parallel: ranks that split each matrix and the attention heads between them, and see the same batch. It
    communicates in every layer, so keep it within a node."""
    context: int = field(default=1, validator=_SIZE)
    """Context parallel: ranks that split each sequence between them, for long sequences. Attention exchanges heads for
    tokens (Ulysses, Jacobs et al. 2023, arXiv:2309.14509)."""
    expert: int = field(default=1, validator=_SIZE)
    """Expert parallel: ranks that hold different experts of a mixture of experts. These are no further ranks: experts
    are laid over the ranks of `tensor` and of data. A multiple of `tensor`."""
    replicate: int = field(default=1, validator=_SIZE)
    """Copies of the sharded model (HSDP): weights are gathered within a copy only, so that this traffic can stay within
    a node. Each copy needs the memory of the whole model, shared over its ranks."""

    @property
    def least_ranks(self) -> int:
        """Return the smallest number of ranks with these sizes."""
        dense = self.tensor * self.context * self.replicate
        return max(dense, self.expert * self.replicate)


@frozen
class Grid:
    """A number of ranks with sizes that divide it. Raises `ValueError` if they do not."""

    ranks: int
    sizes: ParallelConfig = attrs.Factory(ParallelConfig)

    def __attrs_post_init__(self) -> None:
        if wrong := next(_indivisible(self.sizes, self.ranks), None):
            raise ValueError(f"parallel.{wrong}")

    @property
    def fsdp(self) -> int:
        """Return the number of ranks over which FSDP2 shards a weight, within a copy of the model."""
        return self.ranks // (self.sizes.tensor * self.sizes.replicate)

    @property
    def averaged(self) -> int:
        """Return the number of ranks over which FSDP2 averages gradients: all ranks with a tensor coordinate."""
        return self.ranks // self.sizes.tensor

    @property
    def sharing(self) -> int:
        """Return the number of ranks that work on one batch shard."""
        return self.sizes.tensor * self.sizes.context

    @property
    def data(self) -> int:
        """Return the number of batch shards."""
        return self.ranks // self.sharing

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of a rank."""
        place, tensor = divmod(rank, self.sizes.tensor)
        data, context = divmod(place, self.sizes.context)
        return RankCoordinates(data=data, tensor=tensor, context=context)


def _indivisible(sizes: ParallelConfig, ranks: int) -> Iterator[str]:
    """Yield each key that does not divide the ranks, with the reason."""
    if ranks % (sizes.tensor * sizes.context):
        groups = f"{sizes.tensor} (tensor) x {sizes.context} (context)"
        yield f"context: {ranks} ranks cannot be split into groups of {groups}"
    elif ranks % (sizes.tensor * sizes.replicate):
        yield (
            f"replicate: {ranks} ranks cannot be split into {sizes.replicate} copies of a model that "
            f"{sizes.tensor} tensor parallel ranks share"
        )
    elif sizes.expert > 1 and sizes.expert % sizes.tensor:
        yield f"expert: is {sizes.expert}; wanted a multiple of parallel.tensor, which is {sizes.tensor}"
    elif sizes.expert > 1 and (ranks // sizes.replicate) % sizes.expert:
        yield f"expert: is {sizes.expert}; wanted a divisor of the {ranks // sizes.replicate} ranks of a copy"


def problems(sizes: ParallelConfig, model: ModelInfo, layout: str, ranks: int) -> Iterator[Problem]:
    """Yield what a model or a number of ranks does not allow. Paths are within the backend's section."""
    for wrong in _indivisible(sizes, ranks):
        key, _, words = wrong.partition(": ")
        yield Problem(f"parallel.{key}", words)
    yield from _heads(sizes, model)
    yield from _experts(sizes, model)
    if sizes.context > 1 and layout == "padded":
        yield Problem("parallel.context", "needs packed rows; set layout: auto, shared or packed")


def _heads(sizes: ParallelConfig, model: ModelInfo) -> Iterator[Problem]:
    heads, kv = model.heads, model.kv_heads
    if not heads:
        return
    if heads % sizes.tensor or kv % sizes.tensor:
        words = f"is {sizes.tensor}, which does not divide the model's {heads} heads and {kv} key heads"
        yield Problem("parallel.tensor", words)
        return
    heads, kv = heads // sizes.tensor, kv // sizes.tensor
    if heads % sizes.context or (kv % sizes.context and sizes.context % kv):
        words = (
            f"is {sizes.context}; each rank has {heads} heads and {kv} key heads, and wanted is a divisor of the heads "
            "that divides the key heads or is a multiple of them"
        )
        yield Problem("parallel.context", words)


def _experts(sizes: ParallelConfig, model: ModelInfo) -> Iterator[Problem]:
    if sizes.expert == 1:
        return
    if not model.experts:
        yield Problem("parallel.expert", f"is {sizes.expert}, and the model has no experts; leave it out")
    elif model.experts % sizes.expert:
        yield Problem(
            "parallel.expert", f"is {sizes.expert}, which does not divide the model's {model.experts} experts"
        )
