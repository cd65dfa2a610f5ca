"""Filters: decide which groups are trained on."""

from whet.data.records import Group
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
        name = self.config.reward
        for episode in group.episodes:
            # The name may be missing where no reward is known yet, and where the environment records it.
            silent = episode.undecided or any(t.rewards is not None for t in episode.trajectories)
            if name and name not in episode.rewards and not silent:
                raise DataError(f"there is no reward {name!r} to compare; there is {', '.join(episode.rewards)}")
        return any(rewards.min() < rewards.max() for rewards in group.compared(name))
