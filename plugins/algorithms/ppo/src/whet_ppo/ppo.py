"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) of a language model, with a critic.

    rollouts -> values of the critic -> rewards of tokens -> advantages, returns -> critic -> policy

With separate lambdas, this is the algorithm of VC-PPO (arXiv:2503.01491). With a lambda that depends on the length and
a likelihood term, it is the algorithm of VAPO (arXiv:2504.05118). The critic learns before the policy does. Both learn
from values that were computed before either changed.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from whet.component import Spec
from whet.config.build import to_spec
from whet.data.batch import Batch
from whet.data.randomness import derive_seed
from whet_chat.same_tokens import folders_of_roles
from whet_ops.algorithms.config import choose_old_logprobs, reads_old_logprobs, wants_reference
from whet_ops.algorithms.minibatches import train_minibatches
from whet_ops.algorithms.policy_steps import (
    clip_rewards,
    correct_gap,
    keep_uncertain,
    logged,
    mask_overlong,
    penalise_overlong,
    place_correction,
    scored,
    treat_covariance,
    with_correction,
)
from whet_ppo.config import CRITIC, PpoConfig
from whet_ppo.targets import estimate, place_rewards, values_of

if TYPE_CHECKING:
    from whet.data.metrics import Metric
    from whet.interfaces.algorithm import OnlineParts, Step
    from whet.interfaces.backend import Backend


class Ppo:
    """The loop: sample, compare rewards with the values of the critic, train, sync the weights."""

    def __init__(self, config: PpoConfig) -> None:
        self.config = config

    def run(self, parts: "OnlineParts") -> None:
        """Run from the first step that is left to the last. Raises `ConfigError` if the critic has other tokens."""
        folders_of_roles(parts, {CRITIC})
        config, rollouts, backend, critic = self.config, parts.rollouts, parts.backend, parts.roles[CRITIC]
        reference = wants_reference(config, config.loss)
        value_loss, run = to_spec(config.value_loss), parts.config.rollout
        several = config.minibatches * config.epochs > 1
        before, within = place_correction(config.correction, several, config.kl_reward, config.top_entropy)
        scores = several or before.wanted or reads_old_logprobs(config, config.loss)
        old = choose_old_logprobs(config.old_logprobs, scores, config.correction.wanted, run.max_staleness)
        loss = with_correction(parts.loss, within)
        carried = parts.steps.state if config.kl_reward.adaptive.target else None

        for step in parts.steps:
            batch = rollouts.take(config.prompts_per_step)
            batch = logged(step, penalise_overlong(batch, config.overlong, run.max_tokens))
            batch = logged(step, clip_rewards(batch, config.clip_reward))
            batch = scored(batch, backend, old, reference)
            batch = logged(step, mask_overlong(batch, config.overlong))
            batch = logged(step, place_rewards(batch, config.kl_reward, carried))
            values, after = values_of(batch, critic, config.gae.truncated == "bootstrap")
            batch = logged(step, estimate(batch, values, after, config.gae))
            batch = logged(step, treat_covariance(batch, config.covariance, step.seed))
            batch = logged(step, correct_gap(batch, before))
            for metrics in train_epochs(critic, batch, value_loss, config, step, config.critic_epochs or config.epochs):
                step.log(named(metrics))
            if step.number > config.critic_warmup:
                batch = logged(step, keep_uncertain(batch, backend, config.top_entropy))
                for metrics in train_epochs(backend, batch, loss, config, step, config.epochs):
                    step.log(metrics)
            parts.sync_weights(version=step.number)
            step.finish(batch)


def train_epochs(
    backend: "Backend", batch: Batch, loss: Spec, config: PpoConfig, step: "Step", epochs: int
) -> "Iterator[Mapping[str, Metric]]":
    """Train on the minibatches of a batch, cut otherwise in each epoch, and yield the metrics of each."""
    for epoch in range(epochs):
        yield from train_minibatches(backend, batch, loss, config, derive_seed(step.seed, "epoch", epoch))


def named(metrics: "Mapping[str, Metric]") -> "dict[str, Metric]":
    """Return the critic's metrics under names of their own; its timings stand beside those of other roles."""
    return {name_of(name): metric for name, metric in metrics.items()}


def name_of(metric: str) -> str:
    """Name a metric of the critic: `critic/loss`, or `seconds/critic.forward` of `seconds/backend.forward`."""
    kind, _, name = metric.partition("/")
    if kind in ("seconds", "memory"):
        return f"{kind}/{CRITIC}.{name.rpartition('.')[2]}"
    return f"{CRITIC}/{metric}"
