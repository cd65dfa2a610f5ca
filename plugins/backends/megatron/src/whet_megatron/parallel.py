"""How the ranks of a backend share one model: sizes of the parallel axes, and what divides what. Imports no torch.

    rank = ((p * data + d) * context + c) * tensor + t         Megatron's order `tp-cp-ep-dp-pp`

    ranks 8, tensor 2, pipeline 2     rank     0 1   2 3   4 5   6 7
                                      pipeline 0 0   0 0   1 1   1 1    other layers
                                      data     0 0   1 1   0 0   1 1    another batch shard
                                      tensor   0 1   0 1   0 1   0 1    another part of each matrix

What Megatron refuses only when it builds the model or computes the first step is refused by `problems`, in the plan.
"""

from collections.abc import Iterator
from math import lcm

import attrs
from attrs import field, frozen

from whet.component import Problem
from whet.config.bounds import PROCESSES, between
from whet.interfaces.axes import RankCoordinates
from whet_megatron.architecture import Architecture

_SIZE = between(1, PROCESSES)


@frozen
class ParallelConfig:
    """Numbers of ranks along each axis. The ranks that are left are data parallel."""

    tensor: int = field(default=1, validator=_SIZE)
    """Tensor parallel: ranks that split each matrix and the attention heads between them, and see the same batch. It
    communicates in every layer, so keep it within a node."""
    sequence: bool = False
    """Sequence parallel: tensor parallel ranks also share the tokens of norms and residuals (Korthikanti et al. 2022,
    arXiv:2205.05198). It saves memory and costs nothing. Mixtures of experts need it where `tensor` is above 1."""
    pipeline: int = field(default=1, validator=_SIZE)
    """Pipeline parallel: ranks that hold different layers, and pass micro-batches on (1F1B, Narayanan et al. 2021,
    arXiv:2104.04473). The batch of a step needs several micro-batches to keep them busy."""
    virtual: int = field(default=1, validator=between(1, 1024))
    """Virtual stages of each pipeline rank: with 2, a rank holds two runs of layers, which makes bubbles half as long
    (interleaved 1F1B). It needs `pipeline` above 1."""
    context: int = field(default=1, validator=_SIZE)
    """Context parallel: ranks that split each sequence between them, for long sequences."""
    expert: int = field(default=1, validator=_SIZE)
    """Expert parallel: ranks that hold different experts of a mixture of experts. These are no further ranks: experts
    are laid over the ranks of `tensor`, `context` and data."""
    expert_tensor: int = field(default=1, validator=_SIZE)
    """Tensor parallel ranks of each expert. 1: each expert is whole on its rank, which is usual for small experts."""

    @property
    def least_ranks(self) -> int:
        """Return the smallest number of ranks with these sizes."""
        return self.pipeline * lcm(self.tensor * self.context, self.expert * self.expert_tensor)

    @property
    def stages(self) -> int:
        """Return the number of runs of layers."""
        return self.pipeline * self.virtual

    @property
    def senders(self) -> int:
        """Return the number of ranks that send weights: of each stage one for each expert parallel rank."""
        return self.pipeline * self.expert


@frozen
class Grid:
    """A number of ranks with sizes that divide it. Raises `ValueError` if they do not."""

    ranks: int
    sizes: ParallelConfig = attrs.Factory(ParallelConfig)

    def __attrs_post_init__(self) -> None:
        if wrong := next(_indivisible(self.sizes, self.ranks), None):
            raise ValueError(f"parallel.{wrong}")

    @property
    def data(self) -> int:
        """Return the number of batch shards."""
        return self.ranks // (self.sizes.tensor * self.sizes.context * self.sizes.pipeline)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of a rank."""
        place, tensor = divmod(rank, self.sizes.tensor)
        place, context = divmod(place, self.sizes.context)
        pipeline, data = divmod(place, self.data)
        return RankCoordinates(data=data, tensor=tensor, pipeline=pipeline, context=context)

    def source(self, stage: int, expert: int) -> int:
        """Return the rank that sends the experts of an expert parallel rank of a stage; of rank 0 also all else."""
        return stage * (self.ranks // self.sizes.pipeline) + expert * self.sizes.expert_tensor

    def sharers(self, source: int, *, expert: bool) -> range:
        """Return the ranks that hold the parts of what a source sends: of its experts, or of all else."""
        return range(source, source + (self.sizes.expert_tensor if expert else self.sizes.tensor))

    def sender(self, rank: int) -> int | None:
        """Return the number of a rank among those that send weights. None: it sends nothing."""
        stage, place = divmod(rank, self.ranks // self.sizes.pipeline)
        expert, rest = divmod(place, self.sizes.expert_tensor)
        return None if rest or expert >= self.sizes.expert else stage * self.sizes.expert + expert


def padded_rows(vocabulary: int, tensor: int, multiple: int) -> int:
    """Return the rows of an embedding that each tensor parallel rank holds: a multiple of `multiple`, padding
    included.
    """
    return -(-vocabulary // (tensor * multiple)) * multiple


def _indivisible(sizes: ParallelConfig, ranks: int) -> Iterator[str]:
    """Yield each key that does not divide the ranks, with the reason."""
    dense, sparse = sizes.tensor * sizes.context * sizes.pipeline, sizes.expert * sizes.expert_tensor * sizes.pipeline
    if ranks % dense:
        words = f"{sizes.tensor} (tensor) x {sizes.context} (context) x {sizes.pipeline} (pipeline)"
        yield f"pipeline: {ranks} ranks cannot be split into groups of {words}"
    elif ranks % sparse:
        words = f"{sizes.expert} (expert) x {sizes.expert_tensor} (expert_tensor) x {sizes.pipeline} (pipeline)"
        yield f"expert: {ranks} ranks cannot be split into groups of {words}"


def problems(sizes: ParallelConfig, model: Architecture, multiple: int, ranks: int) -> Iterator[Problem]:
    """Yield what a model or a number of ranks does not allow. Paths are within the backend's section.

    `multiple`: the rows of the vocabulary on each rank are padded to a multiple of it.
    """
    for wrong in _indivisible(sizes, ranks):
        key, _, words = wrong.partition(": ")
        yield Problem(f"parallel.{key}", words)
    if sizes.sequence and sizes.tensor == 1:
        yield Problem("parallel.sequence", "is true, and parallel.tensor is 1; leave it out, or raise parallel.tensor")
    yield from _layers(sizes, model)
    yield from _matrices(sizes, model, multiple)
    yield from _experts(sizes, model)


def _layers(sizes: ParallelConfig, model: Architecture) -> Iterator[Problem]:
    if sizes.virtual > 1 and sizes.pipeline == 1:
        words = f"is {sizes.virtual}, and parallel.pipeline is 1; leave it out, or raise parallel.pipeline"
        yield Problem("parallel.virtual", words)
    elif model.layers % sizes.stages:
        key = "pipeline" if model.layers % sizes.pipeline else "virtual"
        held = f"{sizes.pipeline} ranks x {sizes.virtual} virtual" if sizes.virtual > 1 else f"{sizes.pipeline}"
        words = f"is {getattr(sizes, key)}: the model's {model.layers} layers cannot be split evenly into {held} stages"
        yield Problem(f"parallel.{key}", words)


def _matrices(sizes: ParallelConfig, model: Architecture, multiple: int) -> Iterator[Problem]:
    tensor = sizes.tensor
    counts = {"heads": model.heads, "key heads": model.kv_heads}
    if not model.experts:
        counts["feed-forward values"] = model.mlp
    wrong = [f"{count} {what}" for what, count in counts.items() if count % tensor]
    if wrong:
        yield Problem("parallel.tensor", f"is {tensor}, which does not divide the model's {' and '.join(wrong)}")
    rows = padded_rows(model.vocabulary, tensor, multiple)
    if rows * (tensor - 1) >= model.vocabulary:
        words = (
            f"is {multiple}: each of {tensor} tensor parallel ranks would hold {rows} rows of the vocabulary of "
            f"{model.vocabulary}, and the last one padding alone; lower it"
        )
        yield Problem("vocabulary_multiple", words)


def _experts(sizes: ParallelConfig, model: Architecture) -> Iterator[Problem]:
    if not model.experts:
        for key in ("expert", "expert_tensor"):
            if getattr(sizes, key) > 1:
                words = f"is {getattr(sizes, key)}, and the model has no experts; leave it out"
                yield Problem(f"parallel.{key}", words)
        return
    if model.experts % sizes.expert:
        words = f"is {sizes.expert}, which does not divide the model's {model.experts} experts"
        yield Problem("parallel.expert", words)
    if model.expert_mlp % sizes.expert_tensor:
        words = f"is {sizes.expert_tensor}, which does not divide the {model.expert_mlp} values of an expert"
        yield Problem("parallel.expert_tensor", words)
    if sizes.expert == 1 and sizes.expert_tensor != sizes.tensor:
        words = (
            f"is {sizes.expert_tensor}, parallel.expert is 1 and parallel.tensor {sizes.tensor}: Megatron would not "
            "add up the gradients of experts over the tensor parallel ranks; set it to parallel.tensor, or raise "
            "parallel.expert"
        )
        yield Problem("parallel.expert_tensor", words)
    if sizes.tensor > 1 and not sizes.sequence:
        words = "is false; Megatron trains mixtures of experts over tensor parallel ranks with sequence: true alone"
        yield Problem("parallel.sequence", words)
