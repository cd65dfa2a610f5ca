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
from whet_dpo.config import REFERENCE, SftTerm


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


Config = TypeVar("Config", bound=Settings)


@frozen(eq=False)
class Answers:
    """The answers of a batch, one for each sequence."""

    score: Tensor  # [B] float32: log-ratio, or logprob where there is no reference; summed or averaged over tokens
    logprob: Tensor  # [B] float32, summed over tokens, without gradient
    tokens: Tensor  # [B] int64, those to learn


def answers(logprobs: Tensor, batch: Batch, *, referenced: bool, average: bool) -> Answers:
    """Sum up the tokens of each answer. Differences are taken token by token, which rounds less than of sums."""
    mask, lengths = batch["loss_mask"], batch["lengths"]
    logprobs = logprobs.float()
    # `where` rather than a product: whatever stands at a masked token must not reach the sum.
    own = torch.where(mask, logprobs, 0.0)
    ratio = torch.where(mask, logprobs - batch[REFERENCE].float(), 0.0) if referenced else own
    tokens = segment_sum(mask.long(), lengths)
    score = segment_sum(ratio, lengths)
    return Answers(score / tokens.clamp(min=1) if average else score, segment_sum(own.detach(), lengths), tokens)


class PairLoss(Generic[Config]):
    """A loss on pairs: a subclass says what a pair costs. The second term is the likelihood of the chosen answers."""

    referenced = True
    """Whether scores are relative to the reference."""
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.columns: tuple[str, ...] = ("chosen", REFERENCE) if self.referenced else ("chosen",)
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
        tokens = segment_sum(batch["loss_mask"].long(), batch["lengths"])
        chosen, rejected = pair_positions(batch["unit"], batch["chosen"])
        counts = {"preference": (tokens[chosen] + tokens[rejected] > 0).sum()}
        if "sft" in self.weights:
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
        metrics = _metrics(found, chosen[alive], rejected[alive], self.config.beta)
        if "sft" in self.weights:
            terms["sft"], metrics["nll"] = _likelihood(outputs["logprobs"], batch, self.config.sft)
        return LossResult(terms, metrics)


def _metrics(found: Answers, chosen: Tensor, rejected: Tensor, beta: float) -> dict[str, Metric]:
    """Give means over pairs. A reward is beta times the score that the loss compares."""
    rewards, count = beta * found.score.detach(), len(chosen)
    margins = rewards[chosen] - rewards[rejected]
    return {
        "rewards/chosen": mean(rewards[chosen].sum(), count),
        "rewards/rejected": mean(rewards[rejected].sum(), count),
        "rewards/margins": mean(margins.sum(), count),
        "rewards/accuracies": mean(right(margins).sum(), count),
        "logps/chosen": mean(found.logprob[chosen].sum(), count),
        "logps/rejected": mean(found.logprob[rejected].sum(), count),
    }


def right(margins: Tensor) -> Tensor:
    """Give 1 where the chosen answer is ahead, 0 where it is behind, and a half where they are level. -> float32."""
    return (margins > 0).float() + 0.5 * (margins == 0).float()


def _likelihood(logprobs: Tensor, batch: Batch, sft: SftTerm) -> tuple[Tensor, Metric]:
    """Give the sum of the second term, and the mean negative log-likelihood of a chosen token."""
    mask = batch["loss_mask"] & expand(batch["chosen"], batch["lengths"])
    nll = torch.where(mask, -logprobs.float(), 0.0)
    total = segment_mean(nll, batch["lengths"], mask).sum() if sft.average == "sequence" else nll.sum()
    return total, mean(nll.detach().sum(), mask.sum())
