"""The common part of the losses of a policy. Needs torch; only workers import it.

Each loss is a formula of `whet_ops.losses`, for example `PolicyLoss(config, lambda a: reinforce(a.logprobs, ...))`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet_ops import aggregation
from whet_ops.algorithms.config import KlLossSection, KlOldSection, LikelihoodSection, PolicyLossConfig
from whet_ops.diagnostics import kl_metrics, logprob_gaps, ratio_metrics, token_mean
from whet_ops.kl import MOST_NATS, Importance, kl_estimate, log_ratio, penalty_of_kl
from whet_ops.losses import PolicyGradient, finite, sequence_ratio
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
WEIGHED: Mapping[str, Importance] = {
    "none": "none", "score": "score", "ratio": "ratio", "sampler": "ratio", "sequence": "ratio",
}  # fmt: skip
"""The formula for each `importance` of `KlLossSection`."""
OLD_KL_WEIGHT = "old_kl_weight"
"""The column [N] of the weights of a penalty for the distance to the old policy, if a batch has it."""
UNCORRECTED = "uncorrected_advantages"
"""The column of the advantages before a correction within the training pass, which decide what can have a gradient."""


class PolicyLoss:
    """The average of a formula, a penalty for the distance to the reference policy, a likelihood term, an entropy bonus
    (Schulman et al. 2017, equation 9, arXiv:1707.06347), and metrics.

    Without the column `old_logprobs`, the loss uses the policy's own logprobs instead, and the ratio is exactly 1.
    With the column `old_kl_weight` [N], the loss of a token includes this weight times KL(old || policy), estimated by
    k3: KL-Cov, Cui et al. 2025 (arXiv:2505.22617). Advantages are per sequence [B] or per token [N]. A sequence whose
    advantages are all 0 counts in the mean but has no gradient. Exceptions: a penalty or the bonus is on, or
    `likelihood` is on and the response is right.
    """

    def __init__(self, config: PolicyLossConfig, formula: Formula) -> None:
        self.config = config
        self._formula = formula
        self.columns: tuple[str, ...] = ("advantages", "sampler_logprobs")
        self.outputs: tuple[str, ...] = ("logprobs", "entropy") if config.reads_entropy else ("logprobs",)
        weights = {"policy": 1.0}
        if config.kl.weight:
            self.columns = (*self.columns, "reference_logprobs")
            weights["kl"] = config.kl.weight
        if config.kl_old.weight:
            weights["kl_old"] = config.kl_old.weight
        if config.likelihood.weight:
            self.columns = (*self.columns, "reward")
            weights["likelihood"] = config.likelihood.weight
        if config.entropy_weight:
            weights["entropy"] = config.entropy_weight
        self.weights: Mapping[str, float] = weights

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the count that divides each term. Sequences without a gradient count too.

        The count of the term `likelihood` is the number of tokens of right responses, and that of `entropy` with the
        mean over tokens the number of trained tokens.
        """
        counts = dict.fromkeys(self.weights, aggregation.counted(batch, self.config))
        if "likelihood" in counts:
            counts["likelihood"] = self._right(batch).sum()
        if "entropy" in counts and self.config.entropy_mean == "token":
            counts["entropy"] = batch["loss_mask"].sum()
        return counts

    def live(self, batch: Batch) -> Any:
        """Return whether each sequence [B] can have a gradient.

        It can if an advantage or an `old_kl_weight` is not 0, or with `likelihood` if the response is right. With a
        penalty for a distance or an entropy bonus, each sequence with loss tokens can. With the metrics of `all`, those
        without a gradient count as well.
        """
        config = self.config
        if config.kl.weight or config.kl_old.weight or config.entropy_weight or config.metrics == "all":
            return trained(batch["loss_mask"], batch)
        moving = moved(batch, UNCORRECTED if UNCORRECTED in batch else "advantages")
        if OLD_KL_WEIGHT in batch:
            moving = moving | moved(batch, OLD_KL_WEIGHT)
        return moving | trained(self._right(batch), batch) if self.config.likelihood.weight else moving

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sums over this micro-batch.

        Metrics are over the tokens that can have a gradient. If no token can, metrics are over all loss tokens: with a
        broken sampler, all rewards may be 0, and then the logprob gap must still be visible. A backend calls the loss
        with such a micro-batch only if no sequence of the whole batch can have a gradient.
        """
        logprobs, lengths = outputs["logprobs"], batch["lengths"]
        mask = batch["loss_mask"] & expand(self.live(batch), lengths)
        old = batch["old_logprobs"] if "old_logprobs" in batch else logprobs.detach()
        responses = Responses(logprobs, old, of_tokens(batch, "advantages"), mask, lengths)
        found = self._formula(responses)
        near = self.near(responses, batch)
        terms = {"policy": self.sum(found.loss, mask, batch, near)}
        if OLD_KL_WEIGHT in batch:
            # k3 and not |log-ratio|, whose slope where the two agree would be the sign of a rounding error
            moved_by = log_ratio(old, logprobs, self.config.clamp_log_ratio or MOST_NATS)
            penalty = batch[OLD_KL_WEIGHT] * kl_estimate(moved_by, "k3")
            terms["policy"] = terms["policy"] + self.sum(penalty, mask, batch)
        seen = mask if mask.any() else batch["loss_mask"]
        metrics = ratio_metrics(found, seen) | logprob_gaps(logprobs, old, batch, seen)
        metrics |= kl_metrics("kl_old", log_ratio(old, logprobs.detach()), seen)
        if self.config.kl.weight:
            reference = batch["reference_logprobs"]
            terms["kl"] = self.sum(kl_loss(self.config.kl, logprobs, old, batch, mask), mask, batch)
            metrics |= kl_metrics("kl_reference", log_ratio(logprobs.detach(), reference), seen)
        if self.config.kl_old.weight:
            terms["kl_old"] = self.sum(kl_old_loss(self.config.kl_old, logprobs, old, batch), mask, batch)
        if near is not None:
            metrics["off_policy/masked"] = token_mean((~near).float(), seen)
        if self.config.likelihood.weight:
            right = self._right(batch)
            terms["likelihood"] = torch.where(right, -finite(logprobs), 0.0).sum()
            metrics["likelihood"] = token_mean(-finite(logprobs).detach(), right)
        if self.config.reads_entropy:
            metrics["entropy"] = token_mean(outputs["entropy"].detach(), seen)
        if self.config.entropy_weight:
            by_token, bonus = self.config.entropy_mean == "token", -outputs["entropy"]
            terms["entropy"] = torch.where(mask, bonus, 0.0).sum() if by_token else self.sum(bonus, mask, batch)
        return LossResult(terms, metrics)

    def sum(self, values: Tensor, mask: Tensor, batch: Batch, near: "Tensor | None" = None) -> Tensor:
        """Return the sum of values [N] over a mask [N], as the aggregation of the section reduces it."""
        # `where` rather than a product: a nan or inf at a masked token must not reach the sum.
        values = torch.where(mask if near is None else mask & near, values, 0.0)
        total: Tensor = aggregation.total(
            values, mask, batch["lengths"], self.config.aggregation, aggregation.share_of(batch)
        )
        return total

    def near(self, responses: Responses, batch: Batch) -> "Tensor | None":
        """Return the mask of the tokens [N] that off-policy masking keeps. None: there is no such masking."""
        return None

    def _right(self, batch: Batch) -> Tensor:
        return right_tokens(batch, self.config.likelihood)


def trained(mask: Tensor, batch: Batch) -> Any:
    """Return whether each sequence [B] has a token under a mask [N]."""
    return segment_sum(mask.long(), batch["lengths"]) > 0


def right_tokens(batch: Batch, section: LikelihoodSection) -> Tensor:
    """Return which trained tokens [N] belong to correct responses: those with a reward of at least `at_least`.

    The reward has no penalty for leaving the reference: it is the column `task_reward`, if the batch has it.
    """
    reward = batch["task_reward"] if "task_reward" in batch else batch["reward"]
    right: Tensor = batch["loss_mask"] & expand(reward >= section.at_least, batch["lengths"])
    return right


def kl_loss(section: KlLossSection, logprobs: Tensor, old_logprobs: Tensor, batch: Batch, mask: Tensor) -> Tensor:
    """Return the penalty of each token, in nats. logprobs, old_logprobs, mask [N] -> [N].

    Reads `reference_logprobs`, and for the importance `sampler` the column `sampler_logprobs`. See `penalty_of_kl`.
    """
    whole = section.importance == "sequence"
    ratio = sequence_ratio(logprobs, old_logprobs, mask, batch["lengths"], limit=0.0) if whole else None
    sampled = batch["sampler_logprobs"] if section.importance == "sampler" else old_logprobs
    estimate: Tensor = penalty_of_kl(
        logprobs,
        batch["reference_logprobs"],
        sampled,
        section.estimator,
        importance=WEIGHED[section.importance],
        straight_through=section.straight_through,
        limit=section.clamp_log_ratio,
        clamp=section.clamp,
        ratio=ratio,
    )
    return estimate


def kl_old_loss(section: KlOldSection, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> Tensor:
    """Return the penalty of each token, in nats. logprobs, old_logprobs [N] -> [N].

    Reads `sampler_logprobs` where the penalty is for the distance to the sampler.
    """
    others = batch["sampler_logprobs"] if section.to == "sampler" else old_logprobs
    estimate: Tensor = kl_estimate(log_ratio(others, logprobs, section.clamp_log_ratio), section.estimator)
    return estimate
