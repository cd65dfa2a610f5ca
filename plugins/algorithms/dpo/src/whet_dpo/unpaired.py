"""The loss on single answers with a label. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet.metrics import Metric, mean
from whet.ops.reductions import segment_sum
from whet_dpo import formulas
from whet_dpo.config import REFERENCE, KtoLossConfig
from whet_dpo.pairwise import Answers, answers, logps_of, rewards_of, right


class Kto:
    """See `whet_dpo.formulas.kto`: the mean over answers, weighted by their label, or the mean of those of both kinds.

    The baseline is a column, since it is a number of the whole batch and a loss sees a part of it. Answers without a
    token to learn do not count.
    """

    columns: tuple[str, ...] = ("desirable", "kl_baseline", REFERENCE)
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: KtoLossConfig) -> None:
        self.config = config
        one, two = {"preference": 1.0}, {"desirable": 0.5, "undesirable": 0.5}
        self.weights: Mapping[str, float] = two if config.average == "kinds" else one

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the answers with anything to learn, of each kind where each has a mean of its own."""
        alive = segment_sum(batch["loss_mask"].long(), batch["lengths"]) > 0
        return {name: of.sum() for name, of in self._of_terms(alive, batch["desirable"]).items()}

    def _of_terms(self, alive: Tensor, desirable: Tensor) -> dict[str, Tensor]:
        """Say which answers [B] each term is over."""
        if self.config.average == "answers":
            return {"preference": alive}
        return {"desirable": alive & desirable, "undesirable": alive & ~desirable}

    def live(self, batch: Batch) -> Any:
        """Say which sequences are of a unit with anything to learn."""
        tokens = segment_sum(batch["loss_mask"].long(), batch["lengths"])
        return torch.isin(batch["unit"], batch["unit"][tokens > 0])

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum over the answers of this micro-batch."""
        found = answers(outputs["logprobs"], batch, referenced=True, average=False)
        desirable, baseline, config = batch["desirable"], batch["kl_baseline"].float(), self.config
        losses = formulas.kto(found.score, desirable, baseline, config.beta)
        losses = losses * torch.where(desirable, config.desirable_weight, config.undesirable_weight)
        kinds = self._of_terms(found.tokens > 0, desirable)
        terms = {name: torch.where(of, losses, 0.0).sum() for name, of in kinds.items()}
        return LossResult(terms, self._metrics(found, batch))

    def _metrics(self, found: Answers, batch: Batch) -> dict[str, Metric]:
        """Give means over desirable answers, over the others, and over the pairs that lie in one unit."""
        how = self.config.metrics
        alive, rewards, logps = found.tokens > 0, rewards_of(found, self.config.beta, how), logps_of(found, how)
        metrics = {"kl": mean(batch["kl_baseline"][alive].float().sum(), alive.sum())}
        for name, of in (("chosen", alive & batch["desirable"]), ("rejected", alive & ~batch["desirable"])):
            metrics[f"rewards/{name}"] = mean(rewards[of].sum(), of.sum())
            metrics[f"logps/{name}"] = mean(logps[of].sum(), of.sum())
        chosen, rejected = _pairs(batch["unit"], batch["desirable"])
        counted = alive[chosen] | alive[rejected]
        if len(chosen):
            margins = (rewards[chosen] - rewards[rejected])[counted]
            metrics["rewards/accuracies"] = mean(right(margins, how).sum(), counted.sum())
        return metrics


def _pairs(unit: Tensor, desirable: Tensor) -> tuple[Tensor, Tensor]:
    """Find the units that hold a desirable answer and another; records of one answer are none. -> [P], [P]."""
    order = (unit * 2 + ~desirable).argsort(stable=True)
    one, other = order[:-1], order[1:]
    found = (unit[one] == unit[other]) & desirable[one] & ~desirable[other]
    return one[found], other[found]
