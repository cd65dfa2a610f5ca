"""What all losses on pairs share: scores from logprobs, counts, the likelihood of the chosen answers, and metrics.

    logprobs [N] -> score of each sequence [B] -> chosen [P], rejected [P] -> a loss for each pair -> sum

A pair counts where at least one of its answers has a token to learn; an answer without any has the score 0.
"""

from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet.metrics import Metric, mean
from whet.ops.pairs import pair_positions
from whet.ops.reductions import expand, segment_mean, segment_sum
from whet_dpo.config import ANSWER, REFERENCE, PairMetrics, SftTerm, pair_columns


class Settings(Protocol):
    """What every config of a loss on pairs has."""

    @property
    def beta(self) -> float:
        """Scale of rewards."""
        ...

    @property
    def sft(self) -> SftTerm:
        """The second term."""
        ...

    @property
    def metrics(self) -> PairMetrics:
        """What is reported."""
        ...


Config = TypeVar("Config", bound=Settings)


@frozen(eq=False)
class Answers:
    """The answers of a batch, one for each sequence."""

    score: Tensor  # [B] float32: log-ratio, or logprob where there is no reference; summed or averaged over tokens
    total: Tensor  # [B] float32: the same, summed
    logprob: Tensor  # [B] float32, summed over tokens, without gradient
    tokens: Tensor  # [B] int64, those to learn


def answers(logprobs: Tensor, batch: Batch, *, referenced: bool, average: bool) -> Answers:
    """Sum up the tokens of each answer. Differences are taken token by token, which rounds less than of sums."""
    mask, lengths = answer_mask(batch), batch["lengths"]
    logprobs = logprobs.float()
    # `where` rather than a product: whatever stands at a masked token must not reach the sum.
    own = torch.where(mask, logprobs, 0.0)
    ratio = torch.where(mask, logprobs - batch[REFERENCE].float(), 0.0) if referenced else own
    tokens = segment_sum(mask.long(), lengths)
    total = segment_sum(ratio, lengths)
    score = total / tokens.clamp(min=1) if average else total
    return Answers(score, total, segment_sum(own.detach(), lengths), tokens)


def answer_mask(batch: Batch) -> Any:
    """Give the trained tokens of answers [N]: all that are trained, unless prompts are, too."""
    return batch["loss_mask"] & batch[ANSWER] if ANSWER in batch else batch["loss_mask"]


class PairLoss(Generic[Config]):
    """A loss on pairs: a subclass says what a pair costs. The second term is the likelihood of the chosen answers."""

    referenced = True
    """Whether scores are relative to the reference."""
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.columns: tuple[str, ...] = (*pair_columns(config.sft), *([REFERENCE] if self.referenced else []))
        sft = {"sft": config.sft.weight} if config.sft.weight else {}
        self.weights: Mapping[str, float] = {"preference": 1.0, **sft}

    @property
    def average(self) -> bool:
        """Whether scores are means over tokens."""
        return bool(getattr(self.config, "average_logprobs", True))

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Give the loss of each pair from its scores: [P], [P] -> [P]."""
        raise NotImplementedError

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the pairs with anything to learn; of the second term, the tokens or answers it is averaged over."""
        tokens = segment_sum(answer_mask(batch).long(), batch["lengths"])
        chosen, rejected = pair_positions(batch["unit"], batch["chosen"])
        counts = {"preference": (tokens[chosen] + tokens[rejected] > 0).sum()}
        if "sft" in self.weights:
            tokens = segment_sum(batch["loss_mask"].long(), batch["lengths"])
            by_token = self.config.sft.average == "token"
            counts["sft"] = tokens[chosen].sum() if by_token else (tokens[chosen] > 0).sum()
        return counts

    def live(self, batch: Batch) -> Any:
        """Say which sequences are of a pair with anything to learn."""
        tokens = segment_sum(batch["loss_mask"].long(), batch["lengths"])
        chosen, rejected = pair_positions(batch["unit"], batch["chosen"])
        alive = torch.zeros_like(batch["chosen"])
        alive[chosen] = alive[rejected] = tokens[chosen] + tokens[rejected] > 0
        return alive

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum over the pairs of this micro-batch."""
        found = answers(outputs["logprobs"], batch, referenced=self.referenced, average=self.average)
        chosen, rejected = pair_positions(batch["unit"], batch["chosen"])
        alive = found.tokens[chosen] + found.tokens[rejected] > 0
        losses = self.preference(found.score[chosen], found.score[rejected])
        terms = {"preference": torch.where(alive, losses, 0.0).sum()}
        metrics = _metrics(found, chosen[alive], rejected[alive], self.config.beta, self.config.metrics)
        if "sft" in self.weights:
            terms["sft"], metrics["nll"] = _likelihood(outputs["logprobs"], batch, self.config.sft)
        return LossResult(terms, metrics)


def _metrics(found: Answers, chosen: Tensor, rejected: Tensor, beta: float, how: PairMetrics) -> dict[str, Metric]:
    """Give means over pairs. A reward is beta times the score that the loss compares, unless `how` says otherwise."""
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


def rewards_of(found: Answers, beta: float, how: PairMetrics) -> Tensor:
    """Give the reward of each answer as it is reported: [B]."""
    score = found.total if how.rewards == "summed" else found.score
    return score.detach() * (beta if how.scaled else 1.0)


def logps_of(found: Answers, how: PairMetrics) -> Tensor:
    """Give the logprob of each answer as it is reported: [B]."""
    return found.logprob / found.tokens.clamp(min=1) if how.logps == "mean" else found.logprob


def right(margins: Tensor, how: PairMetrics) -> Tensor:
    """Give 1 where the chosen answer is ahead, 0 where it is behind, and where they are level what a tie counts for."""
    tie = {"half": 0.5, "wrong": 0.0, "right": 1.0}[how.ties]
    return (margins > 0).float() + tie * (margins == 0).float()


def _likelihood(logprobs: Tensor, batch: Batch, sft: SftTerm) -> tuple[Tensor, Metric]:
    """Give the sum of the second term, and the mean negative log-likelihood of a chosen token."""
    mask = batch["loss_mask"] & expand(batch["chosen"], batch["lengths"])
    nll = torch.where(mask, -logprobs.float(), 0.0)
    total = segment_mean(nll, batch["lengths"], mask).sum() if sft.average == "sequence" else nll.sum()
    return total, mean(nll.detach().sum(), mask.sum())
