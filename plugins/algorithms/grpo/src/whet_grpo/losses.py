"""The losses of a policy. Needs torch; only workers import it.

Each loss is a formula of `whet_ops.losses`. `PolicyLoss` is their common part.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet_grpo.config import (
    CispoConfig,
    ClippedPgConfig,
    GmpoConfig,
    GroupLossConfig,
    GspoConfig,
    ReinforceConfig,
    SapoConfig,
)
from whet_ops import aggregation
from whet_ops.diagnostics import kl_metrics, logprob_gaps, ratio_metrics, token_mean
from whet_ops.kl import log_ratio
from whet_ops.kl_loss import kl_loss
from whet_ops.likelihood import right_tokens
from whet_ops.losses import (
    PolicyGradient,
    cispo,
    clip_ratio,
    clipped_policy_gradient,
    finite,
    gmpo,
    near_policy,
    reinforce,
    sapo,
    sequence_ratio,
)
from whet_ops.reductions import expand, moved, of_tokens, segment_sum


@frozen(eq=False)
class Responses:
    """The inputs of a formula for one micro-batch: lengths [B], all others [N]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: Tensor


Formula = Callable[[Responses], PolicyGradient]


class PolicyLoss:
    """The average of a formula, a penalty for the distance to the reference policy, a likelihood term, and metrics.

    Without the column `old_logprobs`, the loss uses the policy's own logprobs instead, and the ratio is exactly 1.
    Advantages are per sequence [B] or per token [N]. A sequence whose advantages are all 0 counts in the mean but has
    no gradient. Exceptions: the penalty is on, or `likelihood` is on and the response is right.
    """

    def __init__(self, config: GroupLossConfig, formula: Formula) -> None:
        self.config = config
        self._formula = formula
        self.columns: tuple[str, ...] = ("advantages", "sampler_logprobs")
        self.outputs: tuple[str, ...] = ("logprobs", "entropy") if config.entropy else ("logprobs",)
        weights = {"policy": 1.0}
        if config.kl.weight:
            self.columns = (*self.columns, "reference_logprobs")
            weights["kl"] = config.kl.weight
        if config.likelihood.weight:
            self.columns = (*self.columns, "reward")
            weights["likelihood"] = config.likelihood.weight
        self.weights: Mapping[str, float] = weights

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the count that divides each term. Sequences without a gradient count too.

        The count of the term `likelihood` is the number of tokens of right responses.
        """
        counts = dict.fromkeys(self.weights, aggregation.counted(batch, self.config))
        return counts | ({"likelihood": self._right(batch).sum()} if "likelihood" in counts else {})

    def live(self, batch: Batch) -> Any:
        """Return whether each sequence [B] can have a gradient.

        It can if an advantage is not 0, or with `likelihood` if the response is right. With a penalty, each sequence
        with loss tokens can.
        """
        if self.config.kl.weight:
            return _trained(batch["loss_mask"], batch)
        moving = moved(batch, "advantages")
        return moving | _trained(self._right(batch), batch) if self.config.likelihood.weight else moving

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sums over this micro-batch.

        Metrics are over the tokens that can have a gradient. If no token can, metrics are over all loss tokens: with a
        broken sampler, all rewards may be 0, and then the logprob gap must still be visible.
        """
        logprobs, lengths = outputs["logprobs"], batch["lengths"]
        mask = batch["loss_mask"] & expand(self.live(batch), lengths)
        old = batch["old_logprobs"] if "old_logprobs" in batch else logprobs.detach()
        responses = Responses(logprobs, old, of_tokens(batch, "advantages"), mask, lengths)
        found = self._formula(responses)
        near = self._near(responses, batch)
        terms = {"policy": self._sum(found.loss, mask, batch, near)}
        seen = mask if mask.any() else batch["loss_mask"]
        metrics = ratio_metrics(found, seen) | logprob_gaps(logprobs, old, batch, seen)
        metrics |= kl_metrics("kl_old", log_ratio(old, logprobs.detach()), seen)
        if self.config.kl.weight:
            reference = batch["reference_logprobs"]
            terms["kl"] = self._sum(kl_loss(self.config.kl, logprobs, old, batch, mask), mask, batch)
            metrics |= kl_metrics("kl_reference", log_ratio(logprobs.detach(), reference), seen)
        if near is not None:
            metrics["off_policy/masked"] = token_mean((~near).float(), seen)
        if self.config.likelihood.weight:
            right = self._right(batch)
            terms["likelihood"] = torch.where(right, -finite(logprobs), 0.0).sum()
            metrics["likelihood"] = token_mean(-finite(logprobs).detach(), right)
        if self.config.entropy:
            metrics["entropy"] = token_mean(outputs["entropy"].detach(), seen)
        return LossResult(terms, metrics)

    def _sum(self, values: Tensor, mask: Tensor, batch: Batch, near: Tensor | None = None) -> Tensor:
        # `where` rather than a product: a nan or inf at a masked token must not reach the sum.
        values = torch.where(mask if near is None else mask & near, values, 0.0)
        total: Tensor = aggregation.total(
            values, mask, batch["lengths"], self.config.aggregation, aggregation.share_of(batch)
        )
        return total

    def _near(self, a: Responses, batch: Batch) -> Tensor | None:
        """Return the mask of the tokens [N] that off-policy masking keeps; None if the masking is off."""
        section = self.config.off_policy
        if section.threshold is None:
            return None
        sampled = batch["sampler_logprobs"] if section.since == "sampler" else a.old_logprobs
        return near_policy(a.logprobs, sampled, a.advantages, a.mask, a.lengths, section.threshold)

    def _right(self, batch: Batch) -> Tensor:
        return right_tokens(batch, self.config.likelihood)


def _trained(mask: Tensor, batch: Batch) -> Any:
    """Return whether each sequence [B] has a token under a mask [N]."""
    return segment_sum(mask.long(), batch["lengths"]) > 0


class ClippedPg(PolicyLoss):
    """The clipped policy gradient over tokens; see `whet_ops.losses.clipped_policy_gradient`."""

    def __init__(self, config: ClippedPgConfig) -> None:
        super().__init__(
            config,
            lambda a: clipped_policy_gradient(
                a.logprobs,
                a.old_logprobs,
                a.advantages,
                config.clip_low,
                config.clip_high,
                config.clip_dual,
                config.clamp_log_ratio,
            ),
        )


class Gspo(PolicyLoss):
    """The clipped policy gradient over sequences; see `whet_ops.losses.sequence_ratio`."""

    def __init__(self, config: GspoConfig) -> None:
        def formula(a: Responses) -> PolicyGradient:
            ratio = sequence_ratio(
                a.logprobs,
                a.old_logprobs,
                a.mask,
                a.lengths,
                config.level == "token",
                config.ratio == "product",
                config.clamp_log_ratio,
            )
            return clip_ratio(ratio, a.advantages.float(), config.clip_low, config.clip_high)

        super().__init__(config, formula)


class Cispo(PolicyLoss):
    """REINFORCE with clipped importance weights; see `whet_ops.losses.cispo`."""

    def __init__(self, config: CispoConfig) -> None:
        super().__init__(
            config,
            lambda a: cispo(
                a.logprobs, a.old_logprobs, a.advantages, config.clip_low, config.clip_high, config.clamp_log_ratio
            ),
        )


class Gmpo(PolicyLoss):
    """The geometric mean of clipped ratios; see `whet_ops.losses.gmpo`."""

    def __init__(self, config: GmpoConfig) -> None:
        super().__init__(
            config,
            lambda a: gmpo(
                a.logprobs, a.old_logprobs, a.advantages, a.mask, a.lengths, config.clip_low, config.clip_high,
                config.clamp_log_ratio,
            ),
        )  # fmt: skip


class Sapo(PolicyLoss):
    """A soft gate in place of clipping; see `whet_ops.losses.sapo`."""

    def __init__(self, config: SapoConfig) -> None:
        super().__init__(
            config,
            lambda a: sapo(
                a.logprobs, a.old_logprobs, a.advantages, config.temperature_positive, config.temperature_negative,
                config.clamp_log_ratio,
            ),
        )  # fmt: skip


class Reinforce(PolicyLoss):
    """REINFORCE with truncated importance weights; see `whet_ops.losses.reinforce`."""

    def __init__(self, config: ReinforceConfig) -> None:
        super().__init__(
            config,
            lambda a: reinforce(a.logprobs, a.old_logprobs, a.advantages, config.max_weight, config.clamp_log_ratio),
        )
