"""The common part of all losses on pairs: scores from logprobs, counts, the likelihood of chosen responses, metrics.

    logprobs [N] -> score of each sequence [B] -> chosen [P], rejected [P] -> a loss for each pair -> sum

A pair counts if at least one of its responses has a trained token. A response without trained tokens has the score 0.
"""

from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from whet.data.batch import Batch
from whet.data.metrics import Metric, mean
from whet.interfaces.loss import LossResult
from whet_dpo import formulas
from whet_dpo.loss_config import REFERENCE, RESPONSE, PairMetrics, SftTerm, pair_columns
from whet_ops.pairs import pair_positions, shared_length_weights
from whet_ops.reductions import expand, segment_mean, segment_sum


class Settings(Protocol):
    """The fields that every config of a loss on pairs has."""

    @property
    def beta(self) -> float:
        """Scale of rewards."""

    @property
    def sft(self) -> SftTerm:
        """Return the second term."""

    @property
    def metrics(self) -> PairMetrics:
        """Return what is reported."""


Config = TypeVar("Config", bound=Settings)


@frozen(eq=False)
class Responses:
    """The responses of a batch, one for each sequence."""

    score: Tensor  # [B] float32: what is compared: the total, a function of it, or either divided by the tokens
    total: Tensor  # [B] float32: log-ratio, or logprob where there is no reference, summed over tokens
    logprob: Tensor  # [B] float32, summed over tokens, without gradient
    tokens: Tensor  # [B] int64, those to learn


@frozen
class Scoring:
    """How logprobs become the score of a response."""

    referenced: bool
    """Whether scores are relative to the reference."""
    average: bool
    """Whether scores are means over tokens."""
    ld_alpha: float = 1.0
    """Weight of the tokens beyond the length of the other response of the pair."""
    divergence: formulas.Divergence = "reverse-kl"
    divergence_alpha: float = 0.5


def responses(logprobs: Tensor, batch: Batch, how: Scoring) -> Responses:
    """Return the responses with their sums over tokens. Differences are taken per token, which rounds less."""
    mask, lengths = response_mask(batch), batch["lengths"]
    logprobs = logprobs.float()
    # `where` rather than a product: whatever stands at a masked token must not reach the sum.
    own = torch.where(mask, logprobs, 0.0)
    ratio = torch.where(mask, logprobs - batch[REFERENCE].float(), 0.0) if how.referenced else own
    if how.ld_alpha != 1:
        ratio = ratio * shared_length_weights(mask, lengths, batch["unit"], batch["chosen"], how.ld_alpha)
    tokens = segment_sum(mask.long(), lengths)
    total = segment_sum(ratio, lengths)
    score = formulas.divergence_score(total, how.divergence, how.divergence_alpha)
    score = score / tokens.clamp(min=1) if how.average else score
    return Responses(score, total, segment_sum(own.detach(), lengths), tokens)


def response_mask(batch: Batch) -> Any:
    """Return the mask of trained response tokens [N]. It differs from `loss_mask` only if prompts are trained too."""
    return batch["loss_mask"] & batch[RESPONSE] if RESPONSE in batch else batch["loss_mask"]


def likelihood_mask(batch: Batch, sft: SftTerm) -> Any:
    """Return the mask [N] of tokens whose likelihood counts: chosen responses; with `of: conversation`, prompts too."""
    mask = batch["loss_mask"] if sft.of == "conversation" else response_mask(batch)
    return mask & expand(batch["chosen"], batch["lengths"])


def likelihood_count(batch: Batch, sft: SftTerm) -> Any:
    """Return the divisor of the likelihood: the number of chosen tokens, or of chosen responses that have any."""
    tokens = segment_sum(likelihood_mask(batch, sft).long(), batch["lengths"])
    return tokens.sum() if sft.average == "token" else (tokens > 0).sum()


class PairLoss(Generic[Config]):
    """A loss on pairs. A subclass has the loss of a pair. The second term is the likelihood of chosen responses."""

    referenced = True
    """Whether scores are relative to the reference."""
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.columns: tuple[str, ...] = (*pair_columns(config.sft), *([REFERENCE] if self.referenced else []))
        sft = {"sft": config.sft.weight} if config.sft.weight else {}
        self.weights: Mapping[str, float] = {"preference": 1.0, **sft}

    @property
    def scoring(self) -> Scoring:
        """How the responses are scored. Losses without these keys average, with equal weight for all tokens."""
        names = ("ld_alpha", "divergence", "divergence_alpha")
        found = {name: getattr(self.config, name) for name in names if hasattr(self.config, name)}
        return Scoring(self.referenced, getattr(self.config, "average_logprobs", True), **found)

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair from its scores: [P], [P] -> [P]."""
        raise NotImplementedError

    def compared(self, score: Tensor, chosen: Tensor, rejected: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each pair: score [B], positions of chosen and rejected responses [P], [P] -> [P]."""
        return self.preference(score[chosen], score[rejected])

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the number of pairs with trained tokens; for the second term, its number of tokens or responses."""
        tokens = segment_sum(response_mask(batch).long(), batch["lengths"])
        chosen, rejected = pair_positions(batch["unit"], batch["chosen"])
        counts = {"preference": (tokens[chosen] + tokens[rejected] > 0).sum()}
        if "sft" in self.weights:
            counts["sft"] = likelihood_count(batch, self.config.sft)
        return counts

    def live(self, batch: Batch) -> Any:
        """Return which sequences belong to a pair with trained tokens."""
        return live_pairs(batch)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sums over the pairs of this micro-batch."""
        found = responses(outputs["logprobs"], batch, self.scoring)
        chosen, rejected = pair_positions(batch["unit"], batch["chosen"])
        alive = found.tokens[chosen] + found.tokens[rejected] > 0
        losses = self.compared(found.score, chosen, rejected, batch)
        terms = {"preference": torch.where(alive, losses, 0.0).sum()}
        metrics = _metrics(found, chosen[alive], rejected[alive], self.config.beta, self.config.metrics)
        if "sft" in self.weights:
            terms["sft"], metrics["nll"] = likelihood(outputs["logprobs"], batch, self.config.sft)
        return LossResult(terms, metrics)


def live_pairs(batch: Batch) -> Any:
    """Return which sequences [B] belong to a pair with trained tokens."""
    tokens = segment_sum(batch["loss_mask"].long(), batch["lengths"])
    chosen, rejected = pair_positions(batch["unit"], batch["chosen"])
    alive = torch.zeros_like(batch["chosen"])
    alive[chosen] = alive[rejected] = tokens[chosen] + tokens[rejected] > 0
    return alive


def _metrics(found: Responses, chosen: Tensor, rejected: Tensor, beta: float, how: PairMetrics) -> dict[str, Metric]:
    """Return means over pairs. A reward is beta times the score of the loss, unless `how` sets another scale."""
    rewards, logps, count = rewards_of(found, beta, how), logps_of(found, how), len(chosen)
    margins = rewards[chosen] - rewards[rejected]
    return {
        "rewards/chosen": mean(rewards[chosen].sum(), count),
        "rewards/rejected": mean(rewards[rejected].sum(), count),
        "rewards/margins": mean(margins.sum(), count),
        "rewards/accuracies": mean(right(margins, how).sum(), count),
        "logps/chosen": mean(logps[chosen].sum(), count),
        "logps/rejected": mean(logps[rejected].sum(), count),
    }


def rewards_of(found: Responses, beta: float, how: PairMetrics) -> Tensor:
    """Return the reported reward of each response: [B]."""
    score = found.total if how.rewards == "summed" else found.score
    return score.detach() * (beta if how.scaled else 1.0)


def logps_of(found: Responses, how: PairMetrics) -> Tensor:
    """Return the reported logprob of each response: [B]."""
    return found.logprob / found.tokens.clamp(min=1) if how.logps == "mean" else found.logprob


def right(margins: Tensor, how: PairMetrics) -> Tensor:
    """Return 1 if the chosen response has the higher score, 0 if the lower one; for equal scores, what a tie counts."""
    tie = {"half": 0.5, "wrong": 0.0, "right": 1.0}[how.ties]
    return (margins > 0).float() + tie * (margins == 0).float()


def likelihood(logprobs: Tensor, batch: Batch, sft: SftTerm) -> tuple[Tensor, Metric]:
    """Return the sum of the second term, and the mean negative log-likelihood of a chosen token."""
    mask = likelihood_mask(batch, sft)
    nll = torch.where(mask, -logprobs.float(), 0.0)
    total = segment_mean(nll, batch["lengths"], mask).sum() if sft.average == "sequence" else nll.sum()
    return total, mean(nll.detach().sum(), mask.sum())
