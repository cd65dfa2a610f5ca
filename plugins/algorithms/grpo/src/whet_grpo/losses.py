"""The losses of a policy. Needs torch; only workers import it.

Each is a formula of `whet.ops.losses`; what they share is in `PolicyLoss`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet.ops import aggregation
from whet.ops.diagnostics import kl_metrics, logprob_gaps, ratio_metrics, token_mean
from whet.ops.kl import log_ratio, penalty_of_kl
from whet.ops.losses import PolicyGradient, cispo, clip_ratio, clipped_policy_gradient, reinforce, sequence_ratio
from whet.ops.reductions import expand, moved, of_tokens, segment_sum
from whet_grpo.config import CispoConfig, ClippedPgConfig, GspoConfig, PolicyLossConfig, ReinforceConfig


@frozen(eq=False)
class Answers:
    """What a formula sees of a micro-batch: [N] each, but for the lengths [B]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: Tensor


Formula = Callable[[Answers], PolicyGradient]


class PolicyLoss:
    """A formula, averaged, with a penalty for leaving the reference policy, and metrics.

    Reads the column `old_logprobs` where there is one; else the policy's own logprobs stand for it and the ratio is
    exactly 1. Advantages are per sequence [B] or per token [N]. Without a penalty, sequences whose advantages are all 0
    count in the mean and nowhere else: they have no gradient.
    """

    def __init__(self, config: PolicyLossConfig, formula: Formula) -> None:
        self.config = config
        self._formula = formula
        self.columns: tuple[str, ...] = ("advantages", "sampler_logprobs")
        self.outputs: tuple[str, ...] = ("logprobs", "entropy") if config.entropy else ("logprobs",)
        self.weights: Mapping[str, float] = {"policy": 1.0}
        if config.kl.weight:
            self.columns = (*self.columns, "reference_logprobs")
            self.weights = {"policy": 1.0, "kl": config.kl.weight}

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count what both terms are divided by, dead sequences included."""
        config = self.config
        number = aggregation.count(
            batch["loss_mask"], batch["lengths"], config.aggregation, config.max_length, config.count_empty
        )
        return dict.fromkeys(self.weights, number)

    def live(self, batch: Batch) -> Any:
        """Say which sequences have an advantage other than 0; with a penalty, which have anything to learn."""
        if self.config.kl.weight:
            return segment_sum(batch["loss_mask"].long(), batch["lengths"]) > 0
        return moved(batch, "advantages")

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Compute the sums over this micro-batch.

        Metrics are over the tokens that can have a gradient. Where none can, they are over all loss tokens: a sampler
        that is broken earns nothing, and its gap is what shows it.
        """
        logprobs, lengths = outputs["logprobs"], batch["lengths"]
        mask = batch["loss_mask"] & expand(self.live(batch), lengths)
        old = batch["old_logprobs"] if "old_logprobs" in batch else logprobs.detach()
        found = self._formula(Answers(logprobs, old, of_tokens(batch, "advantages"), mask, lengths))
        terms = {"policy": self._sum(found.loss, mask, lengths)}
        seen = mask if mask.any() else batch["loss_mask"]
        metrics = ratio_metrics(found, seen) | logprob_gaps(logprobs, old, batch, seen)
        metrics |= kl_metrics("kl_old", log_ratio(old, logprobs.detach()), seen)
        if self.config.kl.weight:
            reference = batch["reference_logprobs"]
            terms["kl"] = self._sum(self._penalty(logprobs, reference, old, mask, lengths), mask, lengths)
            metrics |= kl_metrics("kl_reference", log_ratio(logprobs.detach(), reference), seen)
        if self.config.entropy:
            metrics["entropy"] = token_mean(outputs["entropy"].detach(), seen)
        return LossResult(terms, metrics)

    def _sum(self, values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        # `where` rather than a product: whatever stands at a masked token must not reach the sum.
        total: Tensor = aggregation.total(torch.where(mask, values, 0.0), mask, lengths, self.config.aggregation)
        return total

    def _penalty(self, logprobs: Tensor, reference: Tensor, old: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        kl = self.config.kl
        ratio = sequence_ratio(logprobs, old, mask, lengths) if kl.importance == "sequence" else None
        estimate: Tensor = penalty_of_kl(
            logprobs, reference, old, kl.estimator,
            importance="ratio" if kl.importance == "sequence" else kl.importance,
            straight_through=kl.straight_through, limit=kl.clamp_log_ratio, clamp=kl.clamp, ratio=ratio,
        )  # fmt: skip
        return estimate


class ClippedPg(PolicyLoss):
    """The clipped policy gradient over tokens; see `whet.ops.losses.clipped_policy_gradient`."""

    def __init__(self, config: ClippedPgConfig) -> None:
        super().__init__(
            config,
            lambda a: clipped_policy_gradient(
                a.logprobs, a.old_logprobs, a.advantages, config.clip_low, config.clip_high, config.clip_dual
            ),
        )


class Gspo(PolicyLoss):
    """The clipped policy gradient over sequences; see `whet.ops.losses.sequence_ratio`."""

    def __init__(self, config: GspoConfig) -> None:
        def formula(a: Answers) -> PolicyGradient:
            ratio = sequence_ratio(
                a.logprobs, a.old_logprobs, a.mask, a.lengths, config.level == "token", config.ratio == "product"
            )
            return clip_ratio(ratio, a.advantages.float(), config.clip_low, config.clip_high)

        super().__init__(config, formula)


class Cispo(PolicyLoss):
    """REINFORCE with clipped importance weights; see `whet.ops.losses.cispo`."""

    def __init__(self, config: CispoConfig) -> None:
        super().__init__(
            config, lambda a: cispo(a.logprobs, a.old_logprobs, a.advantages, config.clip_low, config.clip_high)
        )


class Reinforce(PolicyLoss):
    """REINFORCE with truncated importance weights; see `whet.ops.losses.reinforce`."""

    def __init__(self, config: ReinforceConfig) -> None:
        super().__init__(config, lambda a: reinforce(a.logprobs, a.old_logprobs, a.advantages, config.max_weight))
