"""The contract of a loss: pure, small, and normalised by counts known before the first forward."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

from whet.data.metrics import Metric

if TYPE_CHECKING:
    from whet.data.batch import Batch


@frozen
class LossResult:
    """What a loss makes of a micro-batch."""

    terms: Mapping[str, Any]
    """Each term's *sum* over the micro-batch: a 0-d tensor with gradient."""
    metrics: Mapping[str, Metric] = field(factory=dict)
    """Mergeable metrics; their numbers may be 0-d tensors without gradient."""


@runtime_checkable
class Loss(Protocol):
    """The objective is the sum over terms of weight x sum / global count.

    `__init__(config)` takes the component's config. A loss sees torch tensors, whole units and full
    sequences whatever the parallelism, calls no collective and keeps no state.
    """

    columns: tuple[str, ...]
    """Batch columns it reads beyond those that are always there."""
    outputs: tuple[str, ...]
    """Model outputs it needs, e.g. `logprobs`, `entropy`. Each [N], 0 where `loss_mask` is false."""
    weights: Mapping[str, float]
    """Weight of each term."""

    def counts(self, batch: "Batch") -> Mapping[str, Any]:
        """Give each term's count from the batch alone; backends sum it over ranks. A count of 0 takes no step."""
        ...

    def live(self, batch: "Batch") -> Any:
        """Say which sequences [B, bool] can add to any term's value or gradient; others may skip the forward.

        Sequences with advantage 0 are dead where nothing but the advantage drives the loss.
        """
        ...

    def __call__(self, outputs: Mapping[str, Any], batch: "Batch") -> LossResult:
        """Compute each term's sum over this micro-batch, and metrics."""
        ...
