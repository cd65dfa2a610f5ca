"""The losses of policy and critic. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet.interfaces.loss import LossResult
from whet_ops import aggregation
from whet_ops.diagnostics import token_mean
from whet_ops.losses import clipped_policy_gradient
from whet_ops.policy_loss import PolicyLoss, trained
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


class PpoClip(PolicyLoss):
    """The clipped policy gradient over tokens; see `whet_ops.losses.clipped_policy_gradient`.

    The likelihood term on right responses is from Yue et al. 2025, "VAPO", section 4.3 (arXiv:2504.05118).
    """

    def __init__(self, config: PpoClipConfig) -> None:
        super().__init__(
            config,
            lambda a: clipped_policy_gradient(
                a.logprobs, a.old_logprobs, a.advantages, config.clip_low, config.clip_high, config.clip_dual,
                config.clamp_log_ratio,
            ),
        )  # fmt: skip


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
        return trained(batch["loss_mask"], batch)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sum over this micro-batch."""
        mask, values = batch["loss_mask"], outputs["values"]
        loss, clipped = clipped_value_error(values, batch["old_values"], batch["returns"], self.config.clip)
        error = (values.detach() - batch["returns"]).abs()
        metrics: dict[str, Metric] = {
            "clip_fraction": token_mean(clipped, mask),
            "error": token_mean(error, mask),
        }
        # `where` rather than a product: whatever stands at a masked token must not reach the sum.
        loss = torch.where(mask, loss, 0.0)
        total = aggregation.total(loss, mask, batch["lengths"], self.config.aggregation, aggregation.share_of(batch))
        return LossResult({"value": total}, metrics)
