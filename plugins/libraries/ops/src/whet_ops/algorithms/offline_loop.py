"""The loop of every algorithm that is fed by data files.

    batch of the step -> prepare -> train -> validate when due -> weights to the generator when evaluated -> finish

An algorithm states what differs: the columns that its loss reads beside the data (`prepare`), what a batch weighs in
the validation loss, and the metrics that follow from others.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from whet.data.metrics import Metric, mean, merge

if TYPE_CHECKING:
    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.interfaces.algorithm import OfflineParts
    from whet.interfaces.backend import Backend
    from whet.interfaces.data import PreparedData

Prepare = Callable[["Batch", int], "Batch"]
"""(batch, step) -> the batch with the columns that the loss reads. Step 0: the batch is validated on."""
Derive = Callable[[Mapping[str, Metric]], Mapping[str, Metric]]
"""Adds metrics that cannot be merged, and so are computed after all batches."""


class OfflineConfig(Protocol):
    """What the config of each such algorithm has."""

    @property
    def batch_size(self) -> int:
        """Return how many records one step consumes."""

    @property
    def validate_every(self) -> int:
        """Return the steps between validations."""


def read_data(parts: "OfflineParts") -> "PreparedData":
    """Return the tokenised data of a run."""
    return parts.data.prepare()


def unchanged(batch: "Batch", step: int) -> "Batch":
    """Return the batch: the loss reads what the data has."""
    return batch


def sequences(batch: "Batch") -> float:
    """Return the weight of a batch: its sequences."""
    return float(batch.sequences)


def trained_tokens(batch: "Batch") -> float:
    """Return the weight of a batch: its trained tokens."""
    return float(batch["loss_mask"].sum())


def offline_loop(
    parts: "OfflineParts",
    data: "PreparedData",
    config: OfflineConfig,
    *,
    prepare: Prepare = unchanged,
    weight: "Callable[[Batch], float]" = sequences,
    derive: Derive = dict,
    over_all: Derive = dict,
    redundant: Collection[str] = (),
) -> None:
    """Train from the first step that is left to the last, and validate before the first, when due and after the last.

    Validation on several files has metrics of all together, `validation/loss`, and of each, `validation/FILE/loss`.
    `weight`: of a batch in `validation/loss`. `over_all`: corrects metrics of all batches together, before `derive`,
    for a loss that is no mean over batches. `redundant`: metrics that validation leaves out.
    """
    backend, size, validation = parts.backend, config.batch_size, data.validation(config.batch_size)

    def validate() -> dict[str, Metric]:
        found = {
            f"validation/{file}/": evaluate_all(backend, (prepare(batch, 0) for batch in batches), parts.loss, weight)
            for file, batches in validation.items()
        }
        whole = {"validation/": merge(found.values())}
        return {
            f"{place}{name}": metric
            for place, metrics in ({**whole, **found} if len(found) > 1 else whole).items()
            for name, metric in derive(over_all(metrics)).items()
            if name not in redundant
        }

    if validation and parts.steps.done == 0:
        parts.steps.log_start(validate())
    for step in parts.steps:
        batch = prepare(data.batch(step.number, size), step.number)
        step.log(derive(backend.train(batch, parts.loss)))
        step.log({"epoch": mean(data.epoch(step.number, size))})
        if validation and step.due(config.validate_every):
            step.log(validate())
        if step.due(parts.config.evaluation.every):
            parts.sync_weights(version=step.number)  # the generator plays the evaluation's episodes
        step.finish(batch)


def evaluate_all(
    backend: "Backend", batches: "Iterable[Batch]", loss: "Spec", weight: "Callable[[Batch], float]"
) -> dict[str, Metric]:
    """Return the metrics of a loss over all batches. `loss` is the mean over batches, each with its weight."""
    found = []
    for batch in batches:
        metrics, share = backend.evaluate(batch, loss), weight(batch)
        found.append({**metrics, "loss": mean(metrics["loss"].number() * share, share)})
    return {name: metric for name, metric in merge(found).items() if name != "tokens"}
