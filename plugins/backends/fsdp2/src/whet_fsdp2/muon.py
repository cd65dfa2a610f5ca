"""Muon for matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), whole or sharded by FSDP2.

    momentum    M <- mu M + (1 - mu) G                       float32, on each rank's shard
    update      U = mu M + (1 - mu) G (nesterov), or M
    orthogonal  O = Newton-Schulz(U / |U|)                   of the whole matrix
    step        W <- (1 - lr decay) W - lr scale(W) O

The same numbers as `torch.optim.Muon`. Several ranks share the matrices out: in each round, a rank gathers the shards
of one matrix, orthogonalizes it, and sends each rank its rows back. So a rank holds one whole matrix at a time.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from whet_fsdp2.config import MuonConfig
from whet_fsdp2.sharding import full, like, local, shard_like

EPS = 1.0e-7
"""The least norm by which an update is divided."""


@frozen(eq=False)
class _Job:
    """A matrix that gets a step."""

    weight: Tensor
    update: Callable[[], Tensor]
    """Returns this rank's shard of the update U."""
    lr: float
    decay: float
    inputs_first: bool
    """Whether the matrix is stored as [inputs, outputs]."""

    @property
    def cost(self) -> int:
        """Return the multiplications of an iteration, up to a factor."""
        return min(self.weight.shape) ** 2 * max(self.weight.shape)


class Muon(torch.optim.Optimizer):
    """Muon over groups of matrices, each group with its `lr`, `weight_decay` and `inputs_first`."""

    def __init__(self, groups: Iterable[Mapping[str, Any]], config: MuonConfig) -> None:
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.iteration_dtype)
        super().__init__([dict(group) for group in groups], {"lr": 0.0, "weight_decay": 0.0, "inputs_first": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step on every matrix that has a gradient. Every rank must take part."""
        jobs = [
            _Job(weight, self._updated(weight), group["lr"], group["weight_decay"], group["inputs_first"])
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        whole = [job for job in jobs if not isinstance(job.weight, DTensor)]
        for job in whole:
            self._apply(job, self._orthogonal(job.update()))
        sharded = sorted((job for job in jobs if isinstance(job.weight, DTensor)), key=lambda job: -job.cost)
        if by_rows := [job for job in sharded if _by_rows(job.weight)]:
            self._share_out(by_rows)
        for job in sharded:  # on several meshes at once every rank orthogonalizes the whole matrix
            if not _by_rows(job.weight):
                update = self._orthogonal(full(like(job.update().to(self._dtype), job.weight)))
                self._apply(job, local(shard_like(update, job.weight)))

    def _updated(self, weight: Tensor) -> Callable[[], Tensor]:
        """Add the gradient to the momentum. Returns a function that computes the update from both."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            state["step"] = torch.zeros(())
        state["step"] += 1
        mean, mine = local(state["momentum"]), local(gradient)
        mean.lerp_(mine, 1 - self._config.momentum)
        return (lambda: mine.lerp(mean, self._config.momentum)) if self._config.nesterov else (lambda: mean)

    def _orthogonal(self, update: Tensor) -> Tensor:
        return orthogonal(update.to(self._dtype), self._config.coefficients, self._config.iterations)

    def _apply(self, job: _Job, rows: Tensor) -> None:
        """Step this rank's rows of a matrix along the orthogonal update's rows."""
        weight = local(job.weight)
        weight.mul_(1 - job.lr * job.decay)
        outputs, inputs = reversed(job.weight.shape) if job.inputs_first else job.weight.shape
        weight.add_(rows, alpha=-job.lr * factor(self._config.scale, outputs, inputs))

    def _share_out(self, jobs: list[_Job]) -> None:
        """Step along the updates of sharded matrices. In each round, rank i orthogonalizes the i-th matrix."""
        import torch.distributed as dist

        assert isinstance(jobs[0].weight, DTensor)
        mesh = jobs[0].weight.device_mesh
        group, ranks, mine = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        for first in range(0, len(jobs), ranks):
            members = jobs[first : first + ranks]
            parts = [job.update().to(self._dtype).flatten() for job in members]
            outgoing = [part.numel() for part in parts] + [0] * (ranks - len(parts))
            own = members[mine].weight if mine < len(members) else None
            incoming = [0] * ranks if own is None else [rows * own.shape[1] for rows in _rows(own, ranks)]
            sent = torch.cat(parts)
            gathered = sent.new_empty(sum(incoming))
            dist.all_to_all_single(gathered, sent, incoming, outgoing, group=group)
            if own is not None:
                gathered = self._orthogonal(gathered.view(own.shape)).reshape(-1)
            found = torch.empty_like(sent)
            dist.all_to_all_single(found, gathered, outgoing, incoming, group=group)
            for job, rows in zip(members, torch.split(found, outgoing[: len(members)]), strict=True):
                self._apply(job, rows.view(-1, job.weight.shape[1]))


def _by_rows(weight: Tensor) -> bool:
    """Return whether the ranks of one mesh share the rows of a matrix between them."""
    return isinstance(weight, DTensor) and weight.placements == (Shard(0),)


def _rows(weight: Tensor, ranks: int) -> list[int]:
    """Return the number of rows of a sharded matrix that each rank holds."""
    assert isinstance(weight, DTensor)
    each = -(-weight.shape[0] // ranks)
    return [min(max(weight.shape[0] - rank * each, 0), each) for rank in range(ranks)]


def orthogonal(update: Tensor, coefficients: tuple[float, float, float], iterations: int) -> Tensor:
    """Return U V^T of the singular value decomposition of a matrix, roughly, by Newton-Schulz in the matrix's dtype."""
    a, b, c = coefficients
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / x.norm().clamp(min=EPS)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def factor(scale: str, outputs: int, inputs: int) -> float:
    """Return the factor on the learning rate of a matrix. See `MuonConfig.scale`."""
    return 0.2 * math.sqrt(max(outputs, inputs)) if scale == "match_rms_adamw" else math.sqrt(max(1, outputs / inputs))
