"""What a loss makes of data that is not learned from."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from whet.data.metrics import Metric, mean, merge

if TYPE_CHECKING:
    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.interfaces.backend import Backend


def evaluate_all(
    backend: "Backend", batches: "Iterable[Batch]", loss: "Spec", weight: "Callable[[Batch], float]"
) -> dict[str, Metric]:
    """Give what the loss gives, over all batches. `loss` is the mean of theirs, each with its weight."""
    found = []
    for batch in batches:
        metrics, share = backend.evaluate(batch, loss), weight(batch)
        found.append({**metrics, "loss": mean(metrics["loss"].number() * share, share)})
    return {name: metric for name, metric in merge(found).items() if name != "tokens"}


def trained_tokens(batch: "Batch") -> float:
    """Weigh a batch by its trained tokens."""
    return float(batch["loss_mask"].sum())


def sequences(batch: "Batch") -> float:
    """Weigh a batch by its sequences."""
    return float(batch.sequences)
