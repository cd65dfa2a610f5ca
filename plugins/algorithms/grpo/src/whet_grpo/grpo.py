"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), and the family that grew from it.

What varies is chosen in the config: advantages, loss, filters, penalties, correction, minibatches and epochs.
"""

from typing import TYPE_CHECKING, Literal

from attrs import evolve

from whet.data.batch import Batch
from whet.model import ModelInfo
from whet.randomness import derive_seed
from whet.stages import (
    advantage_metrics,
    clip_advantages,
    correct_gap,
    mask_overlong,
    penalise_kl,
    penalise_overlong,
)
from whet_grpo.config import GrpoConfig, wants_reference

if TYPE_CHECKING:
    from whet.interfaces.backend import Backend
    from whet.metrics import Metric
    from whet.parts import Parts
    from whet.steps import Step

OldLogprobs = Literal["current", "score", "sampler"]


class Grpo:
    """The loop: sample, compare, learn, hand the weights over."""

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config

    def run(self, parts: "Parts") -> None:
        """Run from the first step that is left to the last."""
        config, rollouts, backend = self.config, parts.rollouts, parts.backend
        assert rollouts is not None  # what feeds on rollouts gets them
        advantages = parts.build(config.advantages)
        old = choose_old_logprobs(config, parts.config.rollout.max_staleness)
        reference = wants_reference(config, ModelInfo(""))  # what a loss reads does not depend on the model
        longest = parts.config.rollout.max_tokens

        for step in parts.steps:
            batch = rollouts.take(config.prompts_per_step)
            batch = logged(step, penalise_overlong(batch, config.overlong, longest))
            batch = scored(batch, backend, old, reference)
            batch = logged(step, penalise_kl(batch, config.kl_reward))
            batch = logged(step, mask_overlong(batch, config.overlong))
            batch = batch.with_columns(advantages=clip_advantages(advantages(batch), config.clip_advantages))
            step.log(advantage_metrics(batch))
            batch = logged(step, correct_gap(batch, config.correction))
            for epoch in range(config.epochs):
                for part in batch.split(config.minibatches, seed=derive_seed(step.seed, "epoch", epoch)):
                    step.log(backend.train(part, parts.loss))
            parts.refit(version=step.number)
            step.finish(batch)


def logged(step: "Step", made: "tuple[Batch, dict[str, Metric]]") -> Batch:
    """Log the metrics of a stage and give its batch."""
    batch, metrics = made
    step.log(metrics)
    return batch


def scored(batch: Batch, backend: "Backend", old: OldLogprobs, reference: bool) -> Batch:
    """Add the logprobs of the old policy and of the reference, where they are wanted."""
    if reference:
        scores = backend.score(batch, ("logprobs",), "reference")
        batch = batch.with_columns(reference_logprobs=scores["logprobs"])
    if old == "score":
        batch = batch.with_columns(old_logprobs=backend.score(batch, ("logprobs",))["logprobs"])
    elif old == "sampler":
        batch = batch.with_columns(old_logprobs=batch["sampler_logprobs"])
    return evolve(batch, info={**batch.info, "old_logprobs": old})


def choose_old_logprobs(config: GrpoConfig, max_staleness: int) -> OldLogprobs:
    """Say where the old policy's logprobs come from, by the rule that `GrpoConfig.old_logprobs` states.

    `current`: the loss takes its own logprobs without gradient, so the ratio is exactly 1. `score`: a forward pass
    of the trainer before the first minibatch. `sampler`: as recorded while sampling.
    """
    wanted, corrected = config.old_logprobs, config.correction.wanted
    if wanted == "sampler" or (wanted == "auto" and max_staleness > 0 and not corrected):
        return "sampler"
    return "current" if config.minibatches * config.epochs == 1 and not corrected else "score"
