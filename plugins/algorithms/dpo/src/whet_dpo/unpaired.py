"""The losses on single responses with a label. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from whet.data.batch import Batch
from whet.data.metrics import Metric, mean
from whet.interfaces.loss import LossResult
from whet_dpo import formulas
from whet_dpo.loss_config import BASELINE, KINDS, REFERENCE, KtoLossConfig
from whet_dpo.pairwise import Responses, Scoring, logps_of, responses, rewards_of, right
from whet_dpo.whole_config import SHIFT, BcoConfig
from whet_ops.reductions import segment_sum

Config = TypeVar("Config", bound=KtoLossConfig)


class ResponseLoss(Generic[Config]):
    """A loss on single responses. A subclass compares the score of a response with a number of the whole batch.

    This number is a column, because a loss sees only a part of the batch. Responses without trained tokens do not
    count. The mean is over responses, weighted by their label, or it is the mean of the means of both kinds.
    """

    outputs: tuple[str, ...] = ("logprobs",)
    metric = ""
    """The name in metrics of the number that scores are compared with."""
    column: str | None = None
    """The column of this number. Without a column the number is 0."""

    def __init__(self, config: Config) -> None:
        self.config = config
        compared = () if self.column is None else (self.column,)
        self.columns: tuple[str, ...] = ("desirable", *compared, REFERENCE)
        one, two = {"preference": 1.0}, {"desirable": 0.5, "undesirable": 0.5}
        self.weights: Mapping[str, float] = two if config.average == "kinds" else one

    def cost(self, score: Tensor, desirable: Tensor, even: Tensor) -> Tensor:
        """Return the loss of each response [B]. `even` [B] is the number that scores are compared with."""
        raise NotImplementedError

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the number of responses with trained tokens, for each kind if each kind has its own mean."""
        alive = segment_sum(batch["loss_mask"].long(), batch["lengths"]) > 0
        return {name: of.sum() for name, of in self._of_terms(alive, batch["desirable"]).items()}

    def _of_terms(self, alive: Tensor, desirable: Tensor) -> dict[str, Tensor]:
        """Return the mask [B] of the responses of each term."""
        if self.config.average == "responses":
            return {"preference": alive}
        return {"desirable": alive & desirable, "undesirable": alive & ~desirable}

    def live(self, batch: Batch) -> Any:
        """Return which sequences belong to a unit with trained tokens."""
        tokens = segment_sum(batch["loss_mask"].long(), batch["lengths"])
        return torch.isin(batch["unit"], batch["unit"][tokens > 0])

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sums over the responses of this micro-batch."""
        found = responses(outputs["logprobs"], batch, Scoring(referenced=True, average=False))
        desirable, config = batch["desirable"], self.config
        even = torch.zeros_like(found.score) if self.column is None else batch[self.column].float()
        losses = self.cost(found.score, desirable, even)
        losses = losses * torch.where(desirable, config.desirable_weight, config.undesirable_weight)
        kinds = self._of_terms(found.tokens > 0, desirable)
        terms = {name: torch.where(of, losses, 0.0).sum() for name, of in kinds.items()}
        metrics = self._metrics(found, even, batch)
        if config.average == "kinds":
            metrics |= {
                name: mean(total.detach(), of.sum())
                for name, total, of in zip(KINDS, terms.values(), kinds.values(), strict=True)
            }
        return LossResult(terms, metrics)

    def _metrics(self, found: Responses, even: Tensor, batch: Batch) -> dict[str, Metric]:
        """Return means over desirable responses, over other responses, and over the pairs."""
        how = self.config.metrics
        alive, rewards, logps = found.tokens > 0, rewards_of(found, self.config.beta, how), logps_of(found, how)
        metrics = {self.metric: mean(even[alive].sum(), alive.sum())}
        for name, of in (("chosen", alive & batch["desirable"]), ("rejected", alive & ~batch["desirable"])):
            metrics[f"rewards/{name}"] = mean(rewards[of].sum(), of.sum())
            metrics[f"logps/{name}"] = mean(logps[of].sum(), of.sum())
        chosen, rejected = _pairs(batch["unit"], batch["desirable"])
        counted = alive[chosen] | alive[rejected]
        if len(chosen):
            margins = (rewards[chosen] - rewards[rejected])[counted]
            metrics["rewards/accuracies"] = mean(right(margins, how).sum(), counted.sum())
        return metrics


class Kto(ResponseLoss[KtoLossConfig]):
    """See `whet_dpo.formulas.kto`."""

    metric, column = "kl", BASELINE

    def cost(self, score: Tensor, desirable: Tensor, even: Tensor) -> Tensor:
        """Return the loss of each response."""
        return formulas.kto(score, desirable, even, self.config.beta)


class Bco(ResponseLoss[BcoConfig]):
    """See `whet_dpo.formulas.bco`. The shift carries no gradient."""

    metric = SHIFT

    def __init__(self, config: BcoConfig) -> None:
        self.column = None if config.shift == "none" else SHIFT
        super().__init__(config)

    def cost(self, score: Tensor, desirable: Tensor, even: Tensor) -> Tensor:
        """Return the loss of each response."""
        return formulas.bco(score, desirable, even, self.config.beta)


def _pairs(unit: Tensor, desirable: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of both responses of each pair: [P], [P]. A record with one response is no pair."""
    order = (unit * 2 + ~desirable).argsort(stable=True)
    one, other = order[:-1], order[1:]
    found = (unit[one] == unit[other]) & desirable[one] & ~desirable[other]
    return one[found], other[found]
