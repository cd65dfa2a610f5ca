"""The contract of a loss: pure, small, and normalised by counts known before the first forward."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

from whet.data.metrics import Metric, mean

if TYPE_CHECKING:
    from whet.data.batch import Batch


def _metrics(given: "Mapping[str, Metric | tuple[Any, Any]]") -> Mapping[str, Metric]:
    """Return the metrics. A pair (sum, count) is a mean."""
    return {name: mean(*metric) if isinstance(metric, tuple) else metric for name, metric in given.items()}


@frozen
class LossResult:
    """What a loss computes from a micro-batch."""

    terms: Mapping[str, Any]
    """Each term's *sum* over the micro-batch: a 0-d tensor with gradient."""
    metrics: Mapping[str, Metric] = field(factory=dict, converter=_metrics)
    """Mergeable metrics; a pair (sum, count) is a mean. Their numbers may be 0-d tensors without gradient."""


@runtime_checkable
class Loss(Protocol):
    """A pure function of model outputs and a batch. The objective is the sum over terms of weight x sum / global count.

    `__init__(config)` takes the component's config. A loss sees torch tensors, whole units and full sequences, whatever
    the parallelism. It calls no collective and keeps no state.
    """

    columns: tuple[str, ...]
    """Batch columns that the loss reads, beyond the columns that are always there."""
    outputs: tuple[str, ...]
    """Model outputs that the loss needs, e.g. `logprobs`, `entropy`. Each is [N], 0 where `loss_mask` is false."""
    weights: Mapping[str, float]
    """The weight of each term."""

    def counts(self, batch: "Batch") -> Mapping[str, Any]:
        """Return each term's count, from the batch alone. Backends sum it over ranks. A count of 0 takes no step."""

    def live(self, batch: "Batch") -> Any:
        """Return which sequences [B, bool] can add to any term's value or gradient. The others may skip the forward
        pass.

        If the advantage alone drives the loss, sequences with advantage 0 add nothing.
        """

    def __call__(self, outputs: Mapping[str, Any], batch: "Batch") -> LossResult:
        """Return each term's sum over this micro-batch, and metrics. `batch.info` has the `step` of the run."""
