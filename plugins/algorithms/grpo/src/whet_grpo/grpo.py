"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), without KL penalty.

Left out on purpose: the KL term and its reference model, which most recipes set to 0 (Yu et al. 2025,
arXiv:2503.14476, section 2.3). What varies is chosen in the config: advantages, loss, filters, minibatches.
"""

from typing import TYPE_CHECKING, Literal

from whet_grpo.config import GrpoConfig

if TYPE_CHECKING:
    from whet.parts import Parts

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

        for step in parts.steps:
            batch = rollouts.take(config.prompts_per_step)
            batch = batch.with_columns(advantages=advantages(batch))
            if old == "score":
                batch = batch.with_columns(old_logprobs=backend.score(batch, ("logprobs",))["logprobs"])
            elif old == "sampler":
                batch = batch.with_columns(old_logprobs=batch["sampler_logprobs"])
            for part in batch.split(config.minibatches, seed=step.seed):
                step.log(backend.train(part, parts.loss))
            parts.refit(version=step.number)
            step.finish(batch)


def choose_old_logprobs(config: GrpoConfig, max_staleness: int) -> OldLogprobs:
    """Say where the old policy's logprobs come from, by the rule that `GrpoConfig.old_logprobs` states.

    `current`: the loss takes its own logprobs without gradient, so the ratio is exactly 1. `score`: a forward pass
    of the trainer before the first minibatch. `sampler`: as recorded while sampling.
    """
    wanted = config.old_logprobs
    if wanted == "sampler" or (wanted == "auto" and max_staleness > 0):
        return "sampler"
    return "current" if config.minibatches == 1 else "score"
