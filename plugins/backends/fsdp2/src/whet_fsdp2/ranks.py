"""The ranks of this backend, and what they add up besides FSDP2."""

from collections.abc import Sequence
from typing import Any

import torch

from whet.errors import ConfigError
from whet.interfaces.workers import WorkerRank
from whet_fsdp2.parallel import Grid, ParallelConfig
from whet_training.ranks import RankGroup
from whet_weights.ports import shortage


class Ranks(RankGroup):
    """The ranks of the backend."""

    def __init__(self, rank: WorkerRank, sizes: ParallelConfig | None = None) -> None:
        try:
            self.grid = Grid(rank.size, sizes or ParallelConfig())
        except ValueError as error:
            raise ConfigError(f"{rank.role}.{error}") from error
        super().__init__(rank, self.grid, hint=shortage)
        if self.size > 1:
            self.make_group("context")

    @property
    def context(self) -> Any:
        """Return the process group of the ranks that share sequences. None: there is one such rank."""
        return self.group("context")

    def sum_tokens(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over the tokens of forward passes. Tensor parallel ranks pass the same tokens."""
        return self.sum_all([float(number) if self.coordinates.tensor == 0 else 0.0 for number in numbers])

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks that share sequences. Not differentiable."""
        if self.context is None:
            return values.detach()
        import torch.distributed as dist

        found = values.detach().clone()
        dist.all_reduce(found, group=self.context)
        return found
