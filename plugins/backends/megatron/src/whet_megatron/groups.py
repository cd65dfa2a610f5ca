"""The ranks of this backend, and Megatron's process groups, which all roles in a process share."""

import gc
from importlib import import_module
from typing import Any

import torch
from attrs import define

from whet.errors import ConfigError
from whet.interfaces.workers import WorkerRank
from whet_megatron.parallel import Grid, ParallelConfig
from whet_training.ranks import RankGroup
from whet_weights.ports import shortage


@define
class _Made:
    """Megatron's groups in this process. They are global, so roles in it must agree on their sizes."""

    sizes: ParallelConfig
    users: int = 0
    owner: "Ranks | None" = None
    """The role that joined the default process group."""


_made: _Made | None = None


class Ranks(RankGroup):
    """The ranks of the backend. A single rank has process groups, too, because Megatron asks for them."""

    def __init__(self, rank: WorkerRank, sizes: ParallelConfig) -> None:
        global _made
        try:
            self.grid = Grid(rank.size, sizes)
        except ValueError as error:
            raise ConfigError(f"{rank.role}.{error}") from error
        if _made is not None and _made.sizes != sizes:
            raise ConfigError(
                f"{rank.role}.parallel: is {sizes}, and another role in the same processes has {_made.sizes}; Megatron "
                "has one set of groups in a process: use equal sizes, or take the role out of cluster.colocate"
            )
        super().__init__(rank, self.grid, alone=True, hint=shortage)
        self.make_group("context")
        self.sizes = sizes
        if _made is None:
            _initialize(sizes)
            _made = _Made(sizes)
        _made.users += 1
        if self._joined:
            _made.owner = self
        self._left = False

    @property
    def reports(self) -> bool:
        """Return whether the driver reads the results of this rank: that of the last stage, of its batch shard."""
        mine = self.coordinates
        return mine.pipeline == self.sizes.pipeline - 1 and mine.tensor == 0 and mine.context == 0

    def sum_reported(self, numbers: list[float]) -> list[float]:
        """Return the sums of numbers of the last stages over the batch shards, in float64."""
        return self.sum_all([float(number) if self.reports else 0.0 for number in numbers])

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on rank 0. They are builtins."""
        found: list[Any] = [None] * self.size if self.rank == 0 else []
        torch.distributed.gather_object(value, found or None)
        return found

    def leave(self) -> None:
        """Leave the groups. The last role in a process ends them."""
        global _made
        if self._left or _made is None:
            return
        self._left = True
        _made.users -= 1
        if _made.users:
            return
        from megatron.core import parallel_state

        owner, _made = _made.owner, None
        parallel_state.destroy_model_parallel()
        if owner is not None:
            RankGroup.leave(owner)


def _initialize(sizes: ParallelConfig) -> None:
    """Make Megatron's groups."""
    # Models of a role that has left keep its groups alive in reference cycles, and gloo's threads of each wake up a
    # hundred times a second.
    gc.collect()
    import_module("whet_megatron.ahead")  # before anything else imports Megatron
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
    )


def seed(value: int) -> None:
    """Seed Megatron's random states, which attention reads even without dropout. The CPU's own state stays."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with torch.random.fork_rng(devices=[]):
        model_parallel_cuda_manual_seed(value % (1 << 31), force_reset_rng=True)
