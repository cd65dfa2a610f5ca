"""Training on the minibatches of a batch. Needs no torch."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict

from whet.component import Spec
from whet.data.batch import Batch
from whet_ops.algorithms.config import MinibatchConfig
from whet_ops.wrapped_loss import WrappedLoss

if TYPE_CHECKING:
    from whet.data.metrics import Metric
    from whet.interfaces.backend import Backend


def train_minibatches(
    backend: "Backend", batch: Batch, loss: Spec, config: MinibatchConfig, seed: int
) -> Iterator[Mapping[str, "Metric"]]:
    """Take an optimizer step on each minibatch of a batch, and yield its metrics. See `MinibatchConfig`.

    A minibatch without a trained token is divided by its own counts in any case: where they are 0, it takes no step.
    """
    whole = None
    if config.count_over == "batch":
        whole, given = batch, {"loss": asdict(loss), "minibatches": config.minibatches}
        loss = Spec("whet_ops.algorithms.minibatches:SharedCount", "", given)
    for part in batch.split(config.minibatches, seed=seed):
        yield backend.train(part, loss, whole if part["loss_mask"].any() else None)


class SharedCount(WrappedLoss):
    """Another loss, each count of which is divided by the number of minibatches.

    With the counts of a whole batch, every minibatch is divided by the mean count of a minibatch.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config["loss"])
        self._minibatches: int = config["minibatches"]

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the counts of the inner loss, divided by the number of minibatches."""
        return {name: count / self._minibatches for name, count in self.inner.counts(batch).items()}
