"""The sections of PPO and its losses, and what planning needs to know of them."""

from typing import Literal

from attrs import Factory, field, frozen
from attrs.validators import ge, le

from whet.component import AlgorithmFacts, LossFacts, RoleNeed, Selection
from whet.config.bounds import BATCH, FACTOR, GROUP, STEPS, above, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet_ops.algorithms.config import (
    AverageConfig,
    ClipSection,
    PolicyConfig,
    PolicyLossConfig,
    policy_facts,
    policy_loss_facts,
)

CRITIC = "critic"
"""The role of the model that computes values."""


@frozen
class GaeSection:
    """Generalised advantage estimation: how rewards and values become advantages and returns."""

    gamma: float = field(default=1.0, validator=[ge(0), le(1)])
    """Discount of a reward for each token that it comes later."""
    lambda_value: float = field(default=1.0, validator=[ge(0), le(1)])
    """Lambda of the returns that the critic learns. 1: the rewards that came, however far they are from the token.
    Below 1, rewards that are far away count less, and the critic's own values more."""
    lambda_policy: float = field(default=0.95, validator=[ge(0), le(1)])
    """Lambda of the advantages that the policy learns from: lower means less variance and more trust in the critic."""
    adaptive_alpha: float = field(default=0.0, validator=between(0, FACTOR))
    """Instead of `lambda_policy`: 1 - 1 / (this x tokens of the response), at least 0. VAPO has 0.05. 0: the same
    lambda for all responses."""
    truncated: Literal["end", "bootstrap"] = "end"
    """How a response that was cut by its length continues. `end`: with nothing, as any other response. `bootstrap`:
    with the value that the critic expects there, in addition to the reward."""
    whiten: Literal["unbiased", "biased", "none"] = "unbiased"
    """Scale the advantages of all trained tokens of a batch to mean 0 and deviation 1. `unbiased`: the variance has n -
    1 in its denominator; `biased`: n."""
    whiten_epsilon: float = field(default=1.0e-8, validator=above(0, 1))
    """A small number that keeps the advantages finite where their variance is small; see `whiten_epsilon_at`."""
    whiten_epsilon_at: Literal["floor", "variance"] = "floor"
    """`floor`: it is the smallest variance. `variance`: it is added to the variance, as in verl, NeMo RL and TRL."""
    whiten_rewards: bool = False
    """Scale the rewards of all trained tokens to deviation 1 first, and keep their mean, as TRL can. Variance and
    epsilon are as for the advantages; with `whiten: none` the variance is unbiased."""


@frozen
class PpoConfig(PolicyConfig):
    """Proximal policy optimisation: a critic predicts the return at each token, and the policy learns from the
    difference.
    """

    group_size: int = field(default=1, validator=between(1, GROUP))
    """Responses to each prompt. PPO compares none of them; several share the computation of their prompt."""
    minibatches: int = field(default=4, validator=between(1, BATCH), kw_only=True)
    """Optimizer steps taken in one pass over each batch, of the policy and of the critic."""
    critic_epochs: int = field(default=0, validator=between(0, GROUP))
    """Passes of the critic over each batch, before the policy's; 0: as many as the policy makes."""
    critic_warmup: int = field(default=0, validator=between(0, STEPS))
    """First steps of the run, on which the critic learns alone."""
    gae: GaeSection = Factory(GaeSection)
    """How rewards and values become advantages."""
    loss: Selection = selection("losses", "ppo-clip")
    """The loss of the policy."""
    value_loss: Selection = selection("losses", "value-clip")
    """The loss of the critic."""


@frozen
class PpoClipConfig(ClipSection, PolicyLossConfig):
    """The clipped policy gradient of PPO, optionally with a likelihood term on right responses and an entropy bonus."""


@frozen
class ValueClipConfig(AverageConfig):
    """Half the squared error of the critic. Its values may move only by `clip` from their values before the step."""

    clip: float = field(default=0.2, validator=between(0, FACTOR))
    """Values count as at most this far from those before the step, where that makes the error larger, in units of the
    reward; 0: no clipping."""


def ppo_facts(config: PpoConfig, model: ModelInfo) -> AlgorithmFacts:
    """Return the facts about the algorithm that planning reads."""

    def optimizer_steps(steps: int) -> dict[str, int]:
        of_policy = max(steps - config.critic_warmup, 0) * config.epochs
        return {
            "backend": of_policy * config.minibatches,
            CRITIC: steps * (config.critic_epochs or config.epochs) * config.minibatches,
        }

    return policy_facts(
        config, config.loss, config.group_size, columns=("old_values", "returns", "token_rewards"),
        token_advantages=True, optimizer_steps=optimizer_steps,
        roles={CRITIC: RoleNeed(frozenset({"values"}), trained=True, conversations=True)},
    )  # fmt: skip


def ppo_clip_facts(config: PpoClipConfig, model: ModelInfo) -> LossFacts:
    """Return the facts about the loss of the policy that planning reads."""
    return policy_loss_facts(config)


def value_clip_facts(config: ValueClipConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of the critic's loss."""
    return LossFacts(
        role=CRITIC, outputs_needed=frozenset({"values"}), columns_read=frozenset({"returns", "old_values"})
    )
