"""Losses that change another loss. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from whet.component import Spec
from whet.config.build import build
from whet.data.batch import Batch
from whet.interfaces.loss import Loss, LossResult


class WrappedLoss:
    """Another loss, the `inner` one. A subclass overrides what it changes. Errors name the inner loss."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Build the inner loss from the fields of its `Spec`."""
        self.inner: Loss = build(Spec(**spec))
        self.columns, self.outputs, self.weights = self.inner.columns, self.inner.outputs, self.inner.weights

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the counts of the inner loss."""
        return self.inner.counts(batch)

    def live(self, batch: Batch) -> Any:
        """Return which sequences can move the inner loss."""
        return self.inner.live(batch)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the result of the inner loss."""
        return self.inner(outputs, batch)


def name_of(loss: Loss) -> str:
    """Return the name of a loss's class, or of the innermost loss that it wraps."""
    while isinstance(loss, WrappedLoss):
        loss = loss.inner
    return type(loss).__name__
