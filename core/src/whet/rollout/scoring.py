"""What counts as a pass, and what is worked out of the samples of a task beside mean rewards."""

from attrs import field, frozen

from whet.data.records import Episode
from whet.errors import ConfigError

ROUNDING = 1e-9
"""By how much a weighted sum may miss the threshold: 0.7 + 0.2 + 0.1 is less than 1."""


@frozen
class Passing:
    """What counts as a pass: a reward of at least so much."""

    reward: str = ""
    """Name of the reward; empty: their weighted sum."""
    at_least: float = 1.0

    def __call__(self, episode: Episode) -> bool:
        """Return whether an episode passes. One that graders could not decide about needs no such reward to fail.

        Raises `ConfigError` where another has no such reward.
        """
        if self.reward and self.reward not in episode.rewards:
            if episode.undecided:
                return False
            raise ConfigError(
                f"evaluation.passing.reward is {self.reward!r}, which the environment {episode.environment!r} does "
                f"not give; it gives {', '.join(episode.rewards)}"
            )
        value = episode.rewards[self.reward] if self.reward else episode.reward
        return value >= self.at_least - ROUNDING


@frozen
class Scoring:
    """What is worked out beside mean rewards."""

    pass_at: tuple[int, ...] = ()
    majority_at: tuple[int, ...] = ()
    passing: Passing = field(factory=Passing)
    unanswered_vote: bool = False
    """Whether samples without an answer vote, as for one that never passes."""
