"""The losses of distillation. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.data.batch import Batch
from whet.data.metrics import Metric, mean
from whet.interfaces.loss import LossResult
from whet_distill.config import FullKlConfig, SampleKlConfig, TeacherPgConfig, TopkKlConfig, wants_entropy
from whet_ops import aggregation
from whet_ops.algorithms.config import AverageConfig
from whet_ops.diagnostics import logprob_gaps
from whet_ops.distillation import topk_divergences, topk_jensen_shannon
from whet_ops.kl import kl_estimate, log_ratio
from whet_ops.losses import clipped_policy_gradient, finite
from whet_ops.reductions import moved, of_tokens, segment_sum


class Divergence:
    """A divergence of student and teacher, by default as the mean over all trained tokens.

    `mixed`: a share of the forward and the rest of the reverse divergence. `jensen-shannon`: see
    `whet_ops.distillation`. With a weight above 0, the negative log-likelihood of the tokens themselves is a second
    term.
    """

    columns: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: TopkKlConfig | FullKlConfig) -> None:
        self.config = config
        self._forward = config.forward
        self._mixed = config.divergence == "mixed"
        self.weights: Mapping[str, float] = {"kl": 1.0}
        if config.likelihood:
            self.weights = {"kl": 1.0, "likelihood": config.likelihood}

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the trained tokens, or the sequences with any."""
        return dict.fromkeys(self.weights, aggregation.counted(batch, self.config))

    def live(self, batch: Batch) -> Any:
        """Return which sequences have a trained token."""
        return segment_sum(batch["loss_mask"].long(), batch["lengths"]) > 0

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum over this micro-batch."""
        mask = batch["loss_mask"]
        found = self.divergences(outputs, batch, mask)
        terms = {"kl": _total(self._wanted(found), batch, self.config)}
        if "likelihood" in self.weights:
            terms["likelihood"] = -_total(finite(outputs["logprobs"]), batch, self.config)
        numbers = {f"kl/{name}": one for name, one in found.items()} | self.further(batch)
        metrics: dict[str, Metric] = {name: mean(_sum(one.detach(), mask), mask.sum()) for name, one in numbers.items()}
        if "sampler_logprobs" in batch:
            metrics |= logprob_gaps(outputs["logprobs"], outputs["logprobs"].detach(), batch, mask)
        return LossResult(terms, metrics)

    def _wanted(self, found: Mapping[str, Tensor]) -> Tensor:
        if self._mixed and self._forward == 1:
            return found["forward"]
        if self._mixed:
            return self._forward * found["forward"] + (1 - self._forward) * found["reverse"]
        return found["jensen_shannon"]

    def divergences(self, outputs: Mapping[str, Any], batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        """Return `forward` and `reverse`, or `jensen_shannon`, at each token: [N] each. `reverse` may be missing if
        only the forward divergence is wanted.
        """
        raise NotImplementedError

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Return further numbers of each token [N], whose means are metrics."""
        return {}


class TopkKl(Divergence):
    """Over K tokens at each place; see `whet_ops.distillation`."""

    columns = ("topk_ids", "teacher_topk_logprobs")

    def __init__(self, config: TopkKlConfig) -> None:
        super().__init__(config)
        self._outside, self._beta = config.outside, config.beta
        self.outputs = ("logprobs", "logprobs_at", *(["entropy"] if wants_entropy(config) else []))

    def divergences(self, outputs: Mapping[str, Any], batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        """Return them at each trained token, 0 elsewhere. With `zero`, `reverse` needs the entropy."""
        student, teacher = outputs["logprobs_at"][mask], batch["teacher_topk_logprobs"][mask]
        if self._mixed:
            entropy = outputs["entropy"][mask] if "entropy" in outputs else None
            forward, reverse = topk_divergences(student, teacher, self._outside, entropy)
            found = {"forward": forward}
            if entropy is not None or self._outside != "zero":
                found["reverse"] = reverse
        else:
            found = {"jensen_shannon": topk_jensen_shannon(student, teacher, self._beta, self._outside)}
        room = outputs["logprobs"].float() * 0.0
        return {name: torch.zeros_like(room).masked_scatter(mask, one) for name, one in found.items()}

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Return how much of the teacher's probability the compared tokens have."""
        return {"teacher/topk_mass": batch["teacher_topk_logprobs"].float().exp().sum(-1)}


class FullKl(Divergence):
    """Over the whole vocabulary; see `whet_ops.logprobs.distribution_kl`."""

    def __init__(self, config: FullKlConfig) -> None:
        super().__init__(config)
        self._output = f"jensen_shannon:{config.beta!r}"
        self.outputs = ("logprobs", *(["kl_forward", "kl_reverse"] if self._mixed else [self._output]))

    def divergences(self, outputs: Mapping[str, Any], batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        """Return what the backend computed."""
        if self._mixed:
            return {"forward": outputs["kl_forward"], "reverse": outputs["kl_reverse"]}
        return {"jensen_shannon": outputs[self._output]}


class SampleKl:
    """An estimate of the divergence of student and teacher at each token, minimised as it is: see `whet_ops.kl`.

        d = log p(token) - log q(token)         k2 = d**2 / 2         k3 = exp(-d) - 1 + d         abs = |d|

    Its gradient is that of the estimate, and none goes through the choice of the tokens (Agarwal et al. 2024,
    arXiv:2306.13649). Over what the student samples, the mean gradient of k2 is that of KL(student || teacher), and
    that of k3 is that of KL(teacher || student) (Tang & Munos 2025, arXiv:2506.09477).
    """

    columns: tuple[str, ...] = ("teacher_logprobs",)
    outputs: tuple[str, ...] = ("logprobs",)

    def __init__(self, config: SampleKlConfig) -> None:
        self.config = config
        self.weights: Mapping[str, float] = {"kl": 1.0}

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the trained tokens, or the sequences with any."""
        return {"kl": aggregation.counted(batch, self.config)}

    def live(self, batch: Batch) -> Any:
        """Return which sequences have a trained token."""
        return segment_sum(batch["loss_mask"].long(), batch["lengths"]) > 0

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum over this micro-batch."""
        mask, logprobs, config = batch["loss_mask"], outputs["logprobs"], self.config
        ratios = log_ratio(logprobs, batch["teacher_logprobs"], config.clamp_log_ratio)
        terms = {"kl": _total(kl_estimate(ratios, config.estimator, config.clamp), batch, config)}
        metrics: dict[str, Metric] = {}
        if "sampler_logprobs" in batch:  # only of the student's own tokens is the mean log-ratio a divergence
            metrics = {"kl/reverse": mean(_sum(ratios.detach(), mask), mask.sum())}
            metrics |= logprob_gaps(logprobs, logprobs.detach(), batch, mask)
        return LossResult(terms, metrics)


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
        """Count the trained tokens, or the sequences with any."""
        return {"policy": aggregation.counted(batch, self.config)}

    def live(self, batch: Batch) -> Any:
        """Return which sequences have an advantage other than 0."""
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
        }
        metrics: dict[str, Metric] = {name: mean(_sum(one, mask), mask.sum()) for name, one in numbers.items()}
        metrics |= logprob_gaps(logprobs, old, batch, mask)
        return LossResult({"policy": _total(found.loss, batch, config)}, metrics)


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    # `where` rather than a product: whatever stands at a masked token must not reach the sum.
    return torch.where(mask, values, 0.0).sum()


def _total(values: Tensor, batch: Batch, config: AverageConfig) -> Tensor:
    """Return the sum of values [N] over the trained tokens, as the aggregation of the section reduces it."""
    mask = batch["loss_mask"]
    reduced: Tensor = aggregation.total(
        torch.where(mask, values, 0.0), mask, batch["lengths"], config.aggregation, aggregation.share_of(batch)
    )
    return reduced
