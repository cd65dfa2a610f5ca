"""Advantages of a batch from the rewards of its groups."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.data.batch import Batch
from whet.ops.advantages import group_mean
from whet_grpo.config import GroupMeanConfig


class GroupMean:
    """Rewards centred in their group, and scaled; see `whet.ops.advantages.group_mean`."""

    def __init__(self, config: GroupMeanConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Give the advantage of each sequence [B]. Every sequence of an episode has that of the episode."""
        config = self.config
        _, first, episode = np.unique(np.asarray(batch["episode"]), return_index=True, return_inverse=True)
        advantages: NDArray[Any] = group_mean(
            batch["reward"][first],
            batch["group"][first],
            scale=config.scale,
            unbiased=config.unbiased,
            epsilon=config.epsilon,
            leave_one_out=config.leave_one_out,
        )
        return advantages[episode]
