"""The losses of a policy. Needs torch; only workers import it.

Each loss is a formula of `whet_ops.losses`. `whet_ops.policy_loss.PolicyLoss` is their common part.
"""

from torch import Tensor

from whet.data.batch import Batch
from whet_grpo.config import (
    CispoConfig,
    ClippedPgConfig,
    DppoConfig,
    GmpoConfig,
    GroupLossConfig,
    GspoConfig,
    ReinforceConfig,
    SapoConfig,
    VespoConfig,
)
from whet_ops.losses import (
    PolicyGradient,
    cispo,
    clip_ratio,
    clipped_policy_gradient,
    dppo,
    gmpo,
    near_policy,
    reinforce,
    sapo,
    sequence_ratio,
    vespo,
)
from whet_ops.policy_loss import PolicyLoss, Responses


class GroupLoss(PolicyLoss):
    """A loss with off-policy sequence masking."""

    config: GroupLossConfig

    def near(self, responses: Responses, batch: Batch) -> Tensor | None:
        """Return the mask of the tokens [N] that off-policy masking keeps; None if the masking is off."""
        section, a = self.config.off_policy, responses
        if section.threshold is None:
            return None
        sampled = batch["sampler_logprobs"] if section.since == "sampler" else a.old_logprobs
        return near_policy(a.logprobs, sampled, a.advantages, a.mask, a.lengths, section.threshold)


class ClippedPg(GroupLoss):
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


class Gspo(GroupLoss):
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
            return clip_ratio(ratio, a.advantages.float(), config.clip_low, config.clip_high, config.clip_dual)

        super().__init__(config, formula)


class Cispo(GroupLoss):
    """REINFORCE with clipped importance weights; see `whet_ops.losses.cispo`."""

    def __init__(self, config: CispoConfig) -> None:
        super().__init__(
            config,
            lambda a: cispo(
                a.logprobs, a.old_logprobs, a.advantages, config.clip_low, config.clip_high, config.clamp_log_ratio
            ),
        )


class Gmpo(GroupLoss):
    """The geometric mean of clipped ratios; see `whet_ops.losses.gmpo`."""

    def __init__(self, config: GmpoConfig) -> None:
        super().__init__(
            config,
            lambda a: gmpo(
                a.logprobs, a.old_logprobs, a.advantages, a.mask, a.lengths, config.clip_low, config.clip_high,
                config.clamp_log_ratio,
            ),
        )  # fmt: skip


class Sapo(GroupLoss):
    """A soft gate in place of clipping; see `whet_ops.losses.sapo`."""

    def __init__(self, config: SapoConfig) -> None:
        super().__init__(
            config,
            lambda a: sapo(
                a.logprobs, a.old_logprobs, a.advantages, config.temperature_positive, config.temperature_negative,
                config.clamp_log_ratio,
            ),
        )  # fmt: skip


class Vespo(GroupLoss):
    """REINFORCE with a smooth weight of a sequence's ratio; see `whet_ops.losses.vespo`."""

    def __init__(self, config: VespoConfig) -> None:
        power = config.power_positive, config.power_negative
        decay = config.decay_positive, config.decay_negative
        super().__init__(
            config,
            lambda a: vespo(
                a.logprobs, a.old_logprobs, a.advantages, a.mask, a.lengths, power, decay, config.clamp_log_ratio
            ),
        )


class Dppo(GroupLoss):
    """REINFORCE within a trust region of probabilities; see `whet_ops.losses.dppo`."""

    def __init__(self, config: DppoConfig) -> None:
        super().__init__(
            config,
            lambda a: dppo(
                a.logprobs, a.old_logprobs, a.advantages, config.divergence, config.bound_low, config.bound_high,
                config.max_weight, config.clamp_log_ratio,
            ),
        )  # fmt: skip


class Reinforce(GroupLoss):
    """REINFORCE with truncated importance weights; see `whet_ops.losses.reinforce`."""

    def __init__(self, config: ReinforceConfig) -> None:
        super().__init__(
            config,
            lambda a: reinforce(a.logprobs, a.old_logprobs, a.advantages, config.max_weight, config.clamp_log_ratio),
        )
