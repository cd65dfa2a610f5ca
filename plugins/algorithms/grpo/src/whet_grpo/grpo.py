"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), and the algorithms derived from it.

The config chooses the parts: advantages, loss, filters, penalties, correction, minibatches and epochs.
"""

from typing import TYPE_CHECKING

from whet.data.randomness import derive_seed
from whet_grpo.config import GrpoConfig
from whet_ops.algorithms import config as shared
from whet_ops.algorithms.config import OldLogprobs, reads_old_logprobs, wants_reference
from whet_ops.algorithms.minibatches import train_minibatches
from whet_ops.algorithms.policy_steps import (
    advantage_metrics,
    clip_advantages,
    clip_rewards,
    correct_gap,
    keep_uncertain,
    logged,
    mask_overlong,
    penalise_kl,
    penalise_overlong,
    place_correction,
    scored,
    treat_covariance,
    with_correction,
)
from whet_ops.members import by_conversation

if TYPE_CHECKING:
    from whet.interfaces.algorithm import OnlineParts


class Grpo:
    """The loop: sample, compare, train, sync the weights."""

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config

    def run(self, parts: "OnlineParts") -> None:
        """Run the remaining steps."""
        config, rollouts, backend = self.config, parts.rollouts, parts.backend
        advantages = parts.build(config.advantages)
        before, within = place_correction(config.correction, several(config), config.kl_reward, config.top_entropy)
        old = choose_old_logprobs(config, parts.config.rollout.max_staleness)
        loss = with_correction(parts.loss, within)
        reference = wants_reference(config, config.loss)
        longest = parts.config.rollout.max_tokens
        bounds = config.clip_advantages, config.clip_advantages_below
        carried = parts.steps.state if config.kl_reward.adaptive.target else None

        for step in parts.steps:
            batch = rollouts.take(config.prompts_per_step)
            batch = logged(step, penalise_overlong(batch, config.overlong, longest))
            batch = logged(step, clip_rewards(batch, config.clip_reward))
            batch = scored(batch, backend, old, reference)
            batch = logged(step, mask_overlong(batch, config.overlong))
            batch = logged(step, penalise_kl(batch, config.kl_reward, carried))
            batch = batch.with_columns(advantages=clip_advantages(by_conversation(advantages, batch), *bounds))
            step.log(advantage_metrics(batch))
            batch = logged(step, treat_covariance(batch, config.covariance, step.seed))
            batch = logged(step, correct_gap(batch, before))
            batch = logged(step, keep_uncertain(batch, backend, config.top_entropy))
            for epoch in range(config.epochs):
                for metrics in train_minibatches(backend, batch, loss, config, derive_seed(step.seed, "epoch", epoch)):
                    step.log(metrics)
            parts.sync_weights(version=step.number)
            step.finish(batch)


def choose_old_logprobs(config: GrpoConfig, max_staleness: int) -> OldLogprobs:
    """Return the source of the old policy's logprobs; see `whet_ops.algorithms.config.choose_old_logprobs`."""
    before, _ = place_correction(config.correction, several(config), config.kl_reward, config.top_entropy)
    scored = several(config) or before.wanted or reads_old_logprobs(config, config.loss)
    return shared.choose_old_logprobs(config.old_logprobs, scored, config.correction.wanted, max_staleness)


def several(config: GrpoConfig) -> bool:
    """Return whether a batch gets more than one optimizer step."""
    return config.minibatches * config.epochs > 1
