"""The loss of reward models: scores from values, counts and metrics. Needs torch; only workers import it.

    values [N] -> score of each sequence [B] -> chosen [P], rejected [P] -> a loss for each pair -> sum

A score is the value where `loss_mask` is true: at one place behind the response, see `whet_rm.records`. (Were there
several, it would be their sum.) A pair counts where both responses have such a place.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.data.batch import Batch
from whet.data.metrics import Metric, mean
from whet.interfaces.loss import LossResult
from whet_ops.pairs import pair_positions
from whet_ops.reductions import segment_sum
from whet_rm import formulas
from whet_rm.config import MARGIN, BradleyTerryConfig

TIES = {"half": 0.5, "wrong": 0.0, "right": 1.0}


class BradleyTerry:
    """See `whet_rm.formulas.bradley_terry`; its second term is `whet_rm.formulas.centering`."""

    outputs: tuple[str, ...] = ("values",)

    def __init__(self, config: BradleyTerryConfig) -> None:
        self.config = config
        self.columns: tuple[str, ...] = ("chosen", MARGIN) if config.margin else ("chosen",)
        second = {"centering": config.centering} if config.centering else {}
        self.weights: Mapping[str, float] = {"preference": 1.0, **second}

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the pairs with two scores."""
        return dict.fromkeys(self.weights, len(_pairs(batch)[0]))

    def live(self, batch: Batch) -> Any:
        """Return which sequences are of a pair with two scores."""
        alive = torch.zeros_like(batch["chosen"])
        for positions in _pairs(batch):
            alive[positions] = True
        return alive

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum over the pairs of this micro-batch."""
        # `where` rather than a product: whatever stands at a masked place must not reach the sum.
        values = torch.where(batch["loss_mask"], outputs["values"].float(), 0.0)
        scores, (first, second) = segment_sum(values, batch["lengths"]), _pairs(batch)
        chosen, rejected = scores[first], scores[second]
        margin = self.config.margin * batch[MARGIN][first].float() if self.config.margin else 0.0
        losses = formulas.bradley_terry(chosen, rejected, margin, self.config.label_smoothing)
        terms = {"preference": losses.sum()}
        if self.config.centering:
            terms["centering"] = formulas.centering(chosen, rejected).sum()
        return LossResult(terms, _metrics(chosen.detach().double(), rejected.detach().double(), TIES[self.config.ties]))


def _pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Find the chosen and the rejected sequence of each pair that has two scores. -> [P], [P]."""
    scored = segment_sum(batch["loss_mask"].long(), batch["lengths"]) > 0
    chosen, rejected = pair_positions(batch["unit"], batch["chosen"])
    alive = scored[chosen] & scored[rejected]
    return chosen[alive], rejected[alive]


def _metrics(chosen: Tensor, rejected: Tensor, tie: float) -> dict[str, Metric]:
    """Return means over pairs, a tie being right by so much. Deviations are computed from means of squares."""
    count, ahead = len(chosen), chosen - rejected
    return {
        "rewards/chosen": mean(chosen.sum(), count),
        "rewards/rejected": mean(rejected.sum(), count),
        "rewards/chosen_squared": mean(chosen.square().sum(), count),
        "rewards/rejected_squared": mean(rejected.square().sum(), count),
        "rewards/margins": mean(ahead.sum(), count),
        "rewards/accuracies": mean(torch.heaviside(ahead, ahead.new_tensor(tie)).sum(), count),
    }
