"""A weighted sum of losses, each a component of its own. Needs torch; only workers import it.

    objective = sum over losses of weight x (the loss's own objective: sum over its terms of weight x sum / count)

Each loss keeps its counts, so the sum is as independent of micro-batches as its losses are.
"""

from collections.abc import Mapping
from typing import Any

from whet.config.build import build_selection
from whet.data.batch import Batch
from whet.data.metrics import Metric, mean
from whet.interfaces.loss import Loss, LossResult
from whet_dpo.whole_config import WeightedSumConfig


class WeightedSum:
    """Losses added up. Metrics of a loss stand under its name; those of the first also stand by themselves.

    Beside them each term's mean is reported, e.g. `dpo/preference`, before weights. It is over the sequences that can
    change any of the losses, as the others may not be in a micro-batch.
    """

    def __init__(self, config: WeightedSumConfig) -> None:
        self._losses: dict[str, Loss] = {term.label: build_selection(term.component) for term in config.terms}
        losses = list(self._losses.values())
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(name for loss in losses for name in loss.columns))
        self.outputs: tuple[str, ...] = tuple(dict.fromkeys(name for loss in losses for name in loss.outputs))
        self.weights: Mapping[str, float] = {
            f"{term.label}/{name}": term.weight * weight
            for term in config.terms
            for name, weight in self._losses[term.label].weights.items()
        }

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count as each loss does."""
        return {
            f"{label}/{name}": count
            for label, loss in self._losses.items()
            for name, count in loss.counts(batch).items()
        }

    def live(self, batch: Batch) -> Any:
        """Return which sequences can move any of the losses."""
        first, *others = (loss.live(batch) for loss in self._losses.values())
        for other in others:
            first = first | other
        return first

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Compute the sums of each loss over this micro-batch."""
        terms: dict[str, Any] = {}
        metrics: dict[str, Metric] = {}
        for label, loss in self._losses.items():
            result, counts = loss(outputs, batch), loss.counts(batch)
            terms |= {f"{label}/{name}": value for name, value in result.terms.items()}
            metrics = metrics or dict(result.metrics)
            metrics |= {f"{label}/{name}": mean(value.detach(), counts[name]) for name, value in result.terms.items()}
            metrics |= {f"{label}/{name}": metric for name, metric in result.metrics.items()}
        return LossResult(terms, metrics)
