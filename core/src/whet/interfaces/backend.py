"""The contract of a training backend: a handle on the driver whose workers hold the model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from whet.cluster.slices import Pending
    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.metrics import Metric
    from whet.refit.link import Link

Weights = Literal["policy", "reference"]


@runtime_checkable
class Backend(Protocol):
    """An algorithm owns optimizer steps; a backend owns everything below one.

    The component's target is called as `target(config, site)` on the driver, with a
    `whet.cluster.slices.Site`; it spawns its workers through `site.slice`.
    """

    def train(self, batch: "Batch", loss: "Spec", count_over: "Batch | None" = None) -> "Mapping[str, Metric]":
        """Take one optimizer step on the batch (NumPy columns), and give merged metrics.

        Counts are those of `count_over` where given: the loss of a part normalised by the whole. Metrics hold
        at least `loss`, `grad_norm` and `lr`; a count of 0 for every term takes no step.
        """
        ...

    def evaluate(self, batch: "Batch", loss: "Spec") -> "Mapping[str, Metric]":
        """Compute the loss and its metrics without gradient."""
        ...

    def score(self, batch: "Batch", outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        """Compute outputs (NumPy, each [N], 0 where `loss_mask` is false) without gradient."""
        ...

    def send_weights(self, link: "Link") -> "Pending":
        """Start to send the policy's weights over a link; done when every bucket has been taken."""
        ...

    def save(self, folder: "Path") -> "Pending":
        """Start to save weights, optimizer and schedule; done when durable."""
        ...

    def load(self, folder: "Path") -> None:
        """Load what `save` wrote. Refuses another model's folder with the difference shown."""
        ...

    def export(self, folder: "Path") -> None:
        """Write a folder that `transformers` loads: weights, config, tokenizer."""
        ...

    def sleep(self) -> None:
        """Give accelerator memory back. Called by whoever shares the devices, never by an algorithm."""
        ...

    def wake(self) -> None:
        """Take it again."""
        ...

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        ...
