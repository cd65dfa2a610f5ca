"""The loss of SFT. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any

import torch

from whet.data.batch import Batch
from whet.data.metrics import mean
from whet.interfaces.loss import LossResult
from whet_ops.reductions import segment_sum
from whet_sft.config import NllConfig


class Nll:
    """Negative log-likelihood: the sum over trained tokens of -log p(token | before), over their number."""

    columns: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: NllConfig) -> None:
        self.weights: Mapping[str, float] = {"nll": 1.0}

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the trained tokens."""
        return {"nll": batch["loss_mask"].sum()}

    def live(self, batch: Batch) -> Any:
        """Return which sequences have a trained token."""
        return segment_sum(batch["loss_mask"].long(), batch["lengths"]) > 0

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum over this micro-batch."""
        mask = batch["loss_mask"]
        # `where` rather than a product: whatever stands at a masked token must not reach the sum.
        nll = -torch.where(mask, outputs["logprobs"], 0.0).sum()
        return LossResult({"nll": nll}, {"nll": mean(nll.detach(), mask.sum())})
