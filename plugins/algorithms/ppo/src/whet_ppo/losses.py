"""The losses of policy and critic. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet.interfaces.loss import LossResult
from whet_ops import aggregation
from whet_ops.diagnostics import kl_metrics, logprob_gaps, ratio_metrics, token_mean
from whet_ops.kl import log_ratio
from whet_ops.kl_loss import kl_loss
from whet_ops.likelihood import right_tokens
from whet_ops.losses import clipped_policy_gradient, finite
from whet_ops.reductions import expand, moved, of_tokens, segment_sum
from whet_ppo.config import PpoClipConfig, ValueClipConfig


def clipped_value_error(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return half the squared error of values per token. values, old_values, returns [N] -> loss, clipped [N].

        near = old + clip(values - old, -clip, clip)
        loss = max((values - returns)**2, (near - returns)**2) / 2

    OpenAI Baselines' PPO2, TRL and verl compute the same. `clipped` (bool) marks where the second error is larger:
    there a value that has moved further than `clip` gets no gradient. `clip` 0: half the squared error alone. Computed
    in float32.
    """
    if not values.shape == old_values.shape == returns.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (values, old_values, returns))
        raise ValueError(f"values, old_values and returns must be [N] alike, found {shapes}")
    values, old_values, returns = values.float(), old_values.float(), returns.float()
    free = (values - returns).square()
    if not clip:
        return free / 2, torch.zeros_like(free, dtype=torch.bool)
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(free, bounded) / 2, (bounded > free).detach()


class PpoClip:
    """The clipped policy gradient over tokens; see `whet_ops.losses.clipped_policy_gradient`.

    Without the column `old_logprobs` the policy's own logprobs take its place, and the ratio is
    exactly 1. Advantages are per token [N] or per sequence [B]. Further terms, each with a weight: a penalty for
    leaving the reference policy (`whet_ops.kl_loss`), the negative log-likelihood of right responses, over their tokens
    (Yue et al. 2025, "VAPO", section 4.3, arXiv:2504.05118), and the negative entropy (Schulman et al. 2017, equation
    9, arXiv:1707.06347).
    """

    def __init__(self, config: PpoClipConfig) -> None:
        self.config = config
        self.columns: tuple[str, ...] = ("advantages", "sampler_logprobs")
        self.outputs: tuple[str, ...] = ("logprobs", "entropy") if config.wants_entropy else ("logprobs",)
        weights = {"policy": 1.0}
        if config.kl.weight:
            self.columns = (*self.columns, "reference_logprobs")
            weights["kl"] = config.kl.weight
        if config.likelihood.weight:
            self.columns = (*self.columns, "reward")
            weights["likelihood"] = config.likelihood.weight
        if config.entropy_weight:
            weights["entropy"] = config.entropy_weight
        self.weights: Mapping[str, float] = weights

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the number of loss tokens, or of sequences with any; for the likelihood, tokens of right responses."""
        counts = dict.fromkeys(self.weights, aggregation.counted(batch, self.config))
        return counts | ({"likelihood": self._right(batch).sum()} if "likelihood" in counts else {})

    def live(self, batch: Batch) -> Any:
        """Return the sequences that have an advantage other than 0 or are right.

        With an entropy bonus or a penalty: all sequences with loss tokens.
        """
        if self.config.entropy_weight or self.config.kl.weight:
            return _trained(batch["loss_mask"], batch)
        moving = moved(batch, "advantages")
        return moving | _trained(self._right(batch), batch) if self.config.likelihood.weight else moving

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sums over this micro-batch.

        Metrics are over the tokens that can have a gradient. If there are none, metrics are over all loss tokens: with
        a broken sampler all rewards may be 0, and then the logprob gap must still be visible.
        """
        config, logprobs, lengths = self.config, outputs["logprobs"], batch["lengths"]
        mask = batch["loss_mask"] & expand(self.live(batch), lengths)
        old = batch["old_logprobs"] if "old_logprobs" in batch else logprobs.detach()
        found = clipped_policy_gradient(
            logprobs, old, of_tokens(batch, "advantages"), config.clip_low, config.clip_high, config.clip_dual,
            config.clamp_log_ratio,
        )  # fmt: skip
        terms = {"policy": _sum(found.loss, mask, batch, config.aggregation)}
        seen = mask if mask.any() else batch["loss_mask"]
        metrics = ratio_metrics(found, seen) | logprob_gaps(logprobs, old, batch, seen)
        metrics |= kl_metrics("kl_old", log_ratio(old, logprobs.detach()), seen)
        if config.kl.weight:
            penalty = kl_loss(config.kl, logprobs, old, batch, mask)
            terms["kl"] = _sum(penalty, mask, batch, config.aggregation)
            metrics |= kl_metrics("kl_reference", log_ratio(logprobs.detach(), batch["reference_logprobs"]), seen)
        if config.likelihood.weight:
            right = self._right(batch)
            terms["likelihood"] = _sum(-finite(logprobs), right, batch, "token")
            metrics["likelihood"] = token_mean(-finite(logprobs).detach(), right)
        if config.entropy_weight:
            terms["entropy"] = _sum(-outputs["entropy"], mask, batch, config.aggregation)
        if config.wants_entropy:
            metrics["entropy"] = token_mean(outputs["entropy"].detach(), seen)
        return LossResult(terms, metrics)

    def _right(self, batch: Batch) -> Tensor:
        return right_tokens(batch, self.config.likelihood)


class ValueClip:
    """The error of the critic over tokens; see `clipped_value_error`."""

    columns: tuple[str, ...] = ("returns", "old_values")
    outputs: tuple[str, ...] = ("values",)
    weights: Mapping[str, float] = {"value": 1.0}

    def __init__(self, config: ValueClipConfig) -> None:
        self.config = config

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the number of loss tokens, or of sequences with any."""
        return {"value": aggregation.counted(batch, self.config)}

    def live(self, batch: Batch) -> Any:
        """Return the sequences that have a loss token."""
        return _trained(batch["loss_mask"], batch)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sum over this micro-batch."""
        mask, values = batch["loss_mask"], outputs["values"]
        loss, clipped = clipped_value_error(values, batch["old_values"], batch["returns"], self.config.clip)
        error = (values.detach() - batch["returns"]).abs()
        metrics: dict[str, Metric] = {
            "clip_fraction": token_mean(clipped, mask),
            "error": token_mean(error, mask),
        }
        return LossResult({"value": _sum(loss, mask, batch, self.config.aggregation)}, metrics)


def _trained(mask: Tensor, batch: Batch) -> Any:
    """Return which sequences [B] have a token under a mask [N]."""
    return segment_sum(mask.long(), batch["lengths"]) > 0


def _sum(values: Tensor, mask: Tensor, batch: Batch, how: aggregation.Aggregation) -> Tensor:
    # `where` rather than a product: whatever stands at a masked token must not reach the sum.
    total: Tensor = aggregation.total(
        torch.where(mask, values, 0.0), mask, batch["lengths"], how, aggregation.share_of(batch)
    )
    return total
