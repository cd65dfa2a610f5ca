"""The loss of GRPO. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any

import torch

from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet.metrics import Metric, largest, mean
from whet.ops.losses import clipped_policy_gradient
from whet.ops.reductions import expand, segment_mean, segment_sum
from whet_grpo.config import ClippedPgConfig


class ClippedPg:
    """The clipped policy gradient over tokens; see `whet.ops.losses.clipped_policy_gradient`.

    Reads the column `old_logprobs` where there is one; else the policy's own logprobs stand for it and the ratio is
    exactly 1. Sequences with advantage 0 count in the mean, and nowhere else: they have no gradient.
    """

    columns: tuple[str, ...] = ("advantages", "sampler_logprobs")

    def __init__(self, config: ClippedPgConfig) -> None:
        self.config = config
        self.outputs: tuple[str, ...] = ("logprobs", "entropy") if config.entropy else ("logprobs",)
        self.weights: Mapping[str, float] = {"policy": 1.0}

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the loss tokens, or the sequences that have any, dead ones included."""
        mask = batch["loss_mask"]
        if self.config.aggregation == "token":
            return {"policy": mask.sum()}
        return {"policy": (segment_sum(mask.long(), batch["lengths"]) > 0).sum()}

    def live(self, batch: Batch) -> Any:
        """Say which sequences have an advantage other than 0."""
        return batch["advantages"] != 0

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Compute the sum over this micro-batch.

        Metrics are over the tokens that can have a gradient. Where none can, they are over all loss tokens: a sampler
        that is broken earns nothing, and its gap is what shows it.
        """
        logprobs, lengths = outputs["logprobs"], batch["lengths"]
        mask = batch["loss_mask"] & expand(self.live(batch), lengths)
        old = batch["old_logprobs"] if "old_logprobs" in batch else logprobs.detach()
        advantages = expand(batch["advantages"], lengths)
        tokens = clipped_policy_gradient(logprobs, old, advantages, self.config.clip_low, self.config.clip_high)
        # `where` rather than a product: whatever stands at a masked token must not reach the sum.
        loss = torch.where(mask, tokens.loss, 0.0)
        total = loss.sum() if self.config.aggregation == "token" else segment_mean(loss, lengths, mask).sum()
        seen = mask if mask.any() else batch["loss_mask"]
        count, gap = seen.sum(), _gap(logprobs, old, batch["sampler_logprobs"])[seen]
        metrics: dict[str, Metric] = {
            "ratio/mean": mean(tokens.ratio[seen].sum(), count),
            "clip_fraction": mean(tokens.clipped[seen].sum(), count),
            "logprob_gap/mean": mean(gap.sum(), count),
            "logprob_gap/max": largest(gap.max() if len(gap) else gap.new_zeros(())),
        }
        if self.config.entropy:
            metrics["entropy"] = mean(outputs["entropy"].detach()[seen].sum(), count)
        return LossResult({"policy": total}, metrics)


def _gap(logprobs: torch.Tensor, old: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    """Give the distance [N] of the sampler's logprobs from the trainer's before this batch was trained on, in nats.

    `old` are those, unless they are the sampler's own: then the policy's of this moment stand for them, which from
    the second minibatch on have moved.
    """
    trainer = logprobs.detach() if torch.equal(old, sampler) else old
    return (trainer - sampler).abs()
