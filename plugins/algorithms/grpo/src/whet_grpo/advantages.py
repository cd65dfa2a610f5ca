"""Advantages of a batch from the rewards of its groups."""

from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from whet.data.batch import Batch
from whet.errors import DataError
from whet.ops.advantages import gdpo, group_mean, whiten
from whet.ops.reductions import expand, segment_sum
from whet.ops.shaping import rewards_to_come
from whet_grpo.config import GdpoConfig, GroupMeanConfig, ReinforcePlusPlusConfig, RlooConfig

PREFIX = "reward:"
"""Columns of named rewards begin with this."""


@frozen(eq=False)
class Episodes:
    """The episodes of a batch; each counts once, however many sequences it has."""

    first: NDArray[Any]
    """A sequence of each: [E]."""
    owner: NDArray[Any]
    """The episode of each sequence: [B]."""
    sizes: NDArray[Any]
    """Sequences of each: [E]."""


def episodes_of(batch: Batch) -> Episodes:
    """Find the episodes of a batch."""
    found = np.unique(np.asarray(batch["episode"]), return_index=True, return_inverse=True, return_counts=True)
    return Episodes(*found[1:])


class GroupMean:
    """Rewards centred in their group, and scaled; see `whet.ops.advantages.group_mean`."""

    def __init__(self, config: GroupMeanConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Give the advantage of each sequence [B]. Every sequence of an episode has that of the episode."""
        config, episodes = self.config, episodes_of(batch)
        advantages = group_mean(
            batch["reward"][episodes.first],
            batch["group"][episodes.first],
            scale=config.scale,
            unbiased=config.unbiased,
            epsilon=config.epsilon,
            leave_one_out=config.leave_one_out,
            deviation_of=config.deviation_of,
        )
        return np.asarray(advantages[episodes.owner])


class Rloo:
    """Rewards less the mean of the others of the group.

        advantage = reward - mean of the group's other rewards;    whiten: / (deviation over the batch + epsilon)

    Ahmadian et al. 2024, section 3.2 (arXiv:2402.14740). TRL's `normalize_advantages` is `whiten`, but for the mean
    over the batch, which is 0. A group of one, and one whose rewards are all equal, get exactly 0.
    """

    def __init__(self, config: RlooConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Give the advantage of each sequence [B]. Every sequence of an episode has that of the episode."""
        config, episodes = self.config, episodes_of(batch)
        rewards, group = batch["reward"][episodes.first], batch["group"][episodes.first]
        advantages = group_mean(rewards, group, scale="none", leave_one_out=True)
        if config.whiten and len(advantages) > 1:
            deviation = advantages.std(ddof=1 if config.unbiased else 0, dtype=np.float64) + config.epsilon
            advantages = np.divide(advantages, deviation, out=np.zeros_like(advantages), where=deviation > 0)
        return np.asarray(advantages[episodes.owner], np.float32)


class ReinforcePlusPlus:
    """Rewards normalised over the whole batch.

        A         = reward still to come at the token;    baseline: less the mean reward of the group
        advantage = (A - mean over the batch) / sqrt(max(variance over the batch, epsilon))

    Hu et al. 2025, section 3 (arXiv:2501.03262). Mean and variance are over trained tokens, as in OpenRLHF, verl and
    NeMo RL, or over episodes. Tokens of an episode with n sequences weigh 1 / n each. verl has the unbiased variance;
    the others, and we, the biased one. A batch of equal rewards gets exactly 0.
    """

    def __init__(self, config: ReinforcePlusPlusConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Give the advantage of each token [N], or without `per_token` of each sequence [B]."""
        config, episodes = self.config, episodes_of(batch)
        rewards = np.asarray(batch["reward"], np.float64)
        if config.baseline:
            per_episode = group_mean(rewards[episodes.first], batch["group"][episodes.first], scale="none")
            rewards = per_episode.astype(np.float64)[episodes.owner]
        lengths, mask = np.asarray(batch["lengths"]), np.asarray(batch["loss_mask"])
        trained = segment_sum(mask.astype(np.int64), lengths)
        share = 1.0 / episodes.sizes[episodes.owner]
        if config.over == "sequences":
            share = share / np.maximum(trained, 1)
        if not config.per_token:
            return self._whiten(rewards, share * trained)
        costs = batch["token_rewards"] if "token_rewards" in batch else np.zeros(batch.tokens, np.float32)
        to_come = rewards_to_come(rewards, costs, lengths)
        return self._whiten(to_come, expand(share, lengths) * mask)

    def _whiten(self, values: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float32]:
        config = self.config
        return whiten(values, weights, unbiased=config.unbiased, epsilon=config.epsilon).astype(np.float32)


class Gdpo:
    """Each named reward normalised in its group, then added up; see `whet.ops.advantages.gdpo`."""

    def __init__(self, config: GdpoConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Give the advantage of each sequence [B]. Every sequence of an episode has that of the episode.

        Raises `DataError` for a reward that is named in the config and not given by the environments.
        """
        config, episodes = self.config, episodes_of(batch)
        named = {name[len(PREFIX) :]: batch[name] for name in batch.per_sequence if name.startswith(PREFIX)}
        named = named or {"reward": batch["reward"]}
        weights = dict(config.weights) or dict.fromkeys(named, 1.0)
        if unknown := sorted(set(weights) - set(named)):
            raise DataError(
                f"algorithm.advantages.weights names the reward {unknown[0]!r}, which no environment gives; there are "
                f"{', '.join(named)}"
            )
        advantages = gdpo(
            {name: named[name][episodes.first] for name in weights},
            batch["group"][episodes.first],
            weights,
            unbiased=config.unbiased,
            epsilon=config.epsilon,
        )
        return np.asarray(advantages[episodes.owner])
