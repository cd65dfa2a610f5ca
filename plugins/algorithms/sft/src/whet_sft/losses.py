"""The loss of SFT. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any

import torch

from whet.data.batch import Batch
from whet.data.metrics import mean
from whet.interfaces.loss import LossResult
from whet_ops.losses import finite
from whet_ops.reductions import segment_sum
from whet_sft.config import NllConfig


class Nll:
    """Negative log-likelihood: the sum over trained tokens of -w log p(token | before), over their number.

        none           w = 1
        probability    w = p(token | before), without gradient

    `probability` is Dynamic Fine-Tuning: Wu et al. 2025 (arXiv:2508.05629). The metric `nll` has no weights.
    """

    columns: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: NllConfig) -> None:
        self.config = config
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
        logprobs = torch.where(mask, outputs["logprobs"], 0.0)
        nll = -logprobs.sum()
        metrics = {"nll": mean(nll.detach(), mask.sum())}
        if self.config.weighting == "probability":
            nll = -(logprobs.detach().exp() * finite(logprobs)).sum()
        return LossResult({"nll": nll}, metrics)
