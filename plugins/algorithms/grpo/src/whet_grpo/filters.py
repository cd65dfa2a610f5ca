"""Which groups are worth training on."""

from whet.data.records import Group
from whet_grpo.config import UnequalRewardsConfig


class UnequalRewards:
    """Keeps groups whose rewards differ; the others have advantage 0.

    The dynamic sampling of DAPO: Yu et al. 2025 (arXiv:2503.14476), section 3.2.
    """

    def __init__(self, config: UnequalRewardsConfig) -> None:
        self.config = config

    def __call__(self, group: Group) -> bool:
        """Say whether to keep a group."""
        rewards = group.rewards
        return bool(rewards.min() < rewards.max())
