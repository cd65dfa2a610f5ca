"""Metrics over data that is not learned from, under names of their own."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from whet.data.metrics import Metric
from whet.run.validation import evaluate_all, sequences

if TYPE_CHECKING:
    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.interfaces.backend import Backend


def validate(
    backend: "Backend", batches: Iterable["Batch"], loss: "Spec", prepare: Callable[["Batch"], "Batch"]
) -> dict[str, Metric]:
    """Return what the loss gives, over all batches. `loss` is the mean of theirs, weighted by their sequences.

    `prepare` adds the columns that the loss reads and the data does not have.
    """
    found = evaluate_all(backend, map(prepare, batches), loss, sequences)
    return {f"validation/{name}": metric for name, metric in found.items()}
