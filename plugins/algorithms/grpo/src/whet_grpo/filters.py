"""Which groups are worth training on."""

from whet.data.records import Episode, Group
from whet.errors import DataError
from whet_grpo.config import UnequalRewardsConfig


class UnequalRewards:
    """Keeps groups whose rewards differ; the others have advantage 0.

    The dynamic sampling of DAPO: Yu et al. 2025 (arXiv:2503.14476), section 3.2. Looks at the rewards as the
    environment gave them, before any penalty of the algorithm. What filters drop in a row is bounded by
    `rollout.max_filtered_groups`.
    """

    def __init__(self, config: UnequalRewardsConfig) -> None:
        self.config = config

    def __call__(self, group: Group) -> bool:
        """Return whether to keep a group. Raises `DataError` where nobody gives the reward to compare."""
        rewards = [self._reward(episode) for episode in group.episodes]
        return min(rewards) < max(rewards)

    def _reward(self, episode: Episode) -> float:
        name = self.config.reward
        if name and name not in episode.rewards:
            if episode.undecided:  # an environment need not name its rewards before it gives them
                return 0.0
            raise DataError(f"there is no reward {name!r} to compare; there is {', '.join(episode.rewards)}")
        return episode.rewards[name] if name else episode.reward
