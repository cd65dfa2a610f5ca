"""The losses of distillation. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet.metrics import Metric, mean
from whet.ops.distillation import topk_divergences
from whet.ops.losses import clipped_policy_gradient, finite
from whet.ops.reductions import moved, of_tokens, segment_sum
from whet_distill.config import FullKlConfig, TeacherPgConfig, TopkKlConfig


class Divergence:
    """A share of the forward and the rest of the reverse divergence, as the mean over all trained tokens.

    With a weight above 0, the negative log-likelihood of the tokens themselves is a second term.
    """

    columns: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: TopkKlConfig | FullKlConfig) -> None:
        self._forward = config.forward
        self.weights: Mapping[str, float] = {"kl": 1.0}
        if config.likelihood:
            self.weights = {"kl": 1.0, "likelihood": config.likelihood}

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the trained tokens."""
        return dict.fromkeys(self.weights, batch["loss_mask"].sum())

    def live(self, batch: Batch) -> Any:
        """Say which sequences have a trained token."""
        return segment_sum(batch["loss_mask"].long(), batch["lengths"]) > 0

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum over this micro-batch."""
        mask = batch["loss_mask"]
        forward, reverse = self.divergences(outputs, batch, mask)
        # `where` rather than a product: whatever stands at a masked token must not reach the sum.
        terms = {"kl": _sum(self._forward * forward + (1 - self._forward) * reverse, mask)}
        if "likelihood" in self.weights:
            terms["likelihood"] = -_sum(finite(outputs["logprobs"]), mask)
        count = mask.sum()
        found = {"kl/forward": forward, "kl/reverse": reverse} | self.further(batch)
        metrics: dict[str, Metric] = {name: mean(_sum(one.detach(), mask), count) for name, one in found.items()}
        return LossResult(terms, metrics)

    def divergences(self, outputs: Mapping[str, Any], batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Give the forward and the reverse divergence at each token: [N]."""
        raise NotImplementedError

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Give further numbers of each token [N], whose means are metrics."""
        return {}


class TopkKl(Divergence):
    """Over K tokens at each place; see `whet.ops.distillation`."""

    columns = ("topk_ids", "teacher_topk_logprobs")

    def __init__(self, config: TopkKlConfig) -> None:
        super().__init__(config)
        self._outside = config.outside
        needs_entropy = config.outside == "zero" and config.forward < 1
        self.outputs = ("logprobs", "logprobs_at", "entropy") if needs_entropy else ("logprobs", "logprobs_at")

    def divergences(self, outputs: Mapping[str, Any], batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Give both at each trained token, 0 elsewhere."""
        student, teacher = outputs["logprobs_at"][mask], batch["teacher_topk_logprobs"][mask]
        entropy = outputs["entropy"][mask] if "entropy" in outputs else None
        forward, reverse = topk_divergences(student, teacher, self._outside, entropy)
        room = outputs["logprobs"].float() * 0.0
        return tuple(torch.zeros_like(room).masked_scatter(mask, one) for one in (forward, reverse))  # type: ignore[return-value]

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Give how much of the teacher's probability the compared tokens have."""
        return {"teacher/topk_mass": batch["teacher_topk_logprobs"].float().exp().sum(-1)}


class FullKl(Divergence):
    """Over the whole vocabulary; see `whet.ops.logprobs.distribution_kl`."""

    outputs = ("logprobs", "kl_forward", "kl_reverse")

    def divergences(self, outputs: Mapping[str, Any], batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Give what the backend computed."""
        return outputs["kl_forward"], outputs["kl_reverse"]


class TeacherPg:
    """The clipped policy gradient with the teacher's opinion as the advantage of each token.

        A = log q(token) - log p_sampler(token)

    Its mean over what the student samples is -KL(student || teacher), so this is the policy gradient of the reverse
    divergence with a discount of 0 (Lu et al. 2025). It is the column `advantages`, which every policy loss can use.
    """

    columns: tuple[str, ...] = ("advantages", "sampler_logprobs")
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: TeacherPgConfig) -> None:
        self.config = config
        self.weights: Mapping[str, float] = {"policy": 1.0}

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the trained tokens."""
        return {"policy": batch["loss_mask"].sum()}

    def live(self, batch: Batch) -> Any:
        """Say which sequences have an advantage other than 0."""
        return moved(batch, "advantages")

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum over this micro-batch."""
        mask, logprobs, config = batch["loss_mask"], outputs["logprobs"], self.config
        old = batch["old_logprobs"] if "old_logprobs" in batch else logprobs.detach()
        advantages = of_tokens(batch, "advantages").float()
        if config.clip_advantages:
            advantages = advantages.clamp(-config.clip_advantages, config.clip_advantages)
        found = clipped_policy_gradient(logprobs, old, advantages, config.clip_low, config.clip_high)
        numbers = {
            "kl/reverse": -of_tokens(batch, "advantages"),
            "ratio/mean": found.ratio,
            "clip_fraction": found.clipped.float(),
            "logprob_gap/mean": (old - batch["sampler_logprobs"]).abs(),
        }
        metrics: dict[str, Metric] = {name: mean(_sum(one, mask), mask.sum()) for name, one in numbers.items()}
        return LossResult({"policy": _sum(found.loss, mask)}, metrics)


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()
