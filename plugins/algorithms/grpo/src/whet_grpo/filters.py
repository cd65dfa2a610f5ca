"""Filters: decide which groups are trained on."""

from whet.data.records import Episode, Group
from whet.errors import DataError
from whet_grpo.config import UnequalRewardsConfig


class UnequalRewards:
    """Keeps groups whose rewards differ. In a group of equal rewards, all advantages are 0.

    The dynamic sampling of DAPO: Yu et al. 2025 (arXiv:2503.14476), section 3.2. The filter compares the rewards of the
    environment, before any penalty of the algorithm. `rollout.max_filtered_groups` limits the number of groups that
    filters may remove in a row.
    """

    def __init__(self, config: UnequalRewardsConfig) -> None:
        self.config = config

    def __call__(self, group: Group) -> bool:
        """Return whether to keep a group. Raises `DataError` if no environment returns the reward to compare."""
        rewards = [self._reward(episode) for episode in group.episodes]
        return min(rewards) < max(rewards)

    def _reward(self, episode: Episode) -> float:
        name = self.config.reward
        if name and name not in episode.rewards:
            if episode.undecided:  # before the reward is known, its name may be missing
                return 0.0
            raise DataError(f"there is no reward {name!r} to compare; there is {', '.join(episode.rewards)}")
        return episode.rewards[name] if name else episode.reward
