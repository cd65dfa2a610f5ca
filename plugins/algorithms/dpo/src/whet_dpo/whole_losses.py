"""The losses on pairs that read a number of the whole batch from a column. Needs torch; only workers import it.

Each is an exact part of a sum over the whole batch, so it does not depend on how the batch is cut: the columns hold
what the other parts would tell it, see `whet_dpo.whole`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.data.batch import Batch
from whet.data.metrics import mean
from whet.interfaces.loss import LossResult
from whet_dpo import formulas
from whet_dpo.pairwise import PairLoss
from whet_dpo.whole_config import MARGIN_SHIFT, MATCHED, SHIFT, AotConfig, AotUnpairedConfig, BcoPairConfig


class BcoPair(PairLoss[BcoPairConfig]):
    """See `whet_dpo.formulas.bco`: the sum over both responses. The shift carries no gradient."""

    def __init__(self, config: BcoPairConfig) -> None:
        super().__init__(config)
        self.shifted = config.shift != "none"
        self.columns = (*self.columns, SHIFT) if self.shifted else self.columns

    def compared(self, score: Tensor, chosen: Tensor, rejected: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each pair."""
        shift = batch[SHIFT].float() if self.shifted else torch.zeros_like(score)
        losses = formulas.bco(score, batch["chosen"], shift, self.config.beta)
        return losses[chosen] + losses[rejected]

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum over the pairs of this micro-batch; the shift is reported as well."""
        found = super().__call__(outputs, batch)
        if not self.shifted:
            return found
        shift = mean(batch[SHIFT].float().sum(), batch.sequences)
        return LossResult(found.terms, {**found.metrics, SHIFT: shift})


class Aot(PairLoss[AotConfig]):
    """DPO's loss of the differences of two sorted lists: log-ratios of chosen to rejected, of policy and reference.

        a = logprob(chosen) - logprob(rejected) of the policy, b the same of the reference, both over the whole batch
        d = a - b', with b' the number of b that has the rank in b that a has in a
          = margin + (b - b')                        the column `margin_shift` holds b - b' of each pair

    The reference has no gradient, and which b' is opposite changes only where two of a are equal, so the gradient is
    that of the sorted sum. Melnyk et al. 2024 (arXiv:2406.05882).
    """

    def __init__(self, config: AotConfig) -> None:
        super().__init__(config)
        self.columns = (*self.columns, MARGIN_SHIFT)

    def compared(self, score: Tensor, chosen: Tensor, rejected: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each pair."""
        apart = score[chosen] - score[rejected] + batch[MARGIN_SHIFT][chosen].float()
        return formulas.dpo(apart, self.config.beta, self.config.label_smoothing)


class AotUnpaired(PairLoss[AotUnpairedConfig]):
    """DPO's loss of the differences of two sorted lists: scores of chosen and of rejected responses.

    A chosen response and the rejected one of its rank need not be of one pair, so they may lie in different
    micro-batches. The column `matched_score` holds the score opposite, without gradient. Each response adds half of the
    loss and its whole share of the gradient. Value and gradient are then those of the sorted sum, as each of the two
    responses moves the loss by itself. Melnyk et al. 2024 (arXiv:2406.05882).
    """

    def __init__(self, config: AotUnpairedConfig) -> None:
        super().__init__(config)
        self.columns = (*self.columns, MATCHED)

    def compared(self, score: Tensor, chosen: Tensor, rejected: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each pair: half of the losses that its two responses are part of."""
        opposite = batch[MATCHED].float()
        apart = torch.where(batch["chosen"], score - opposite, opposite - score)
        losses = formulas.dpo(apart, self.config.beta, self.config.label_smoothing)
        halves = (losses[chosen] + losses[rejected]) / 2
        return 2 * halves - halves.detach()
