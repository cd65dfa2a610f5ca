"""The criterion of a pass, and which estimates are computed from the samples of a task beside mean rewards."""

from attrs import field, frozen

from whet.data.records import Episode
from whet.errors import ConfigError

ROUNDING = 1e-9
"""How far a weighted sum may be below the threshold: in floats 0.7 + 0.2 + 0.1 is less than 1."""


@frozen
class Passing:
    """The criterion of a pass: a reward of at least this value."""

    reward: str = ""
    """Name of the reward; empty: the weighted sum of all."""
    at_least: float = 1.0

    def __call__(self, episode: Episode) -> bool:
        """Return whether an episode passes. An undecided episode that lacks the reward does not pass.

        Raises `ConfigError` if another episode lacks the reward.
        """
        if self.reward and self.reward not in episode.rewards:
            if episode.undecided:
                return False
            raise ConfigError(
                f"evaluation.passing.reward is {self.reward!r}, which an episode of "
                f"{episode.environment!r} does not give; it gives {', '.join(episode.rewards)}; all must give it"
            )
        value = episode.rewards[self.reward] if self.reward else episode.reward
        return value >= self.at_least - ROUNDING


@frozen
class Scoring:
    """What is computed beside mean rewards."""

    pass_at: tuple[int, ...] = ()
    majority_at: tuple[int, ...] = ()
    passing: Passing = field(factory=Passing)
    unanswered_vote: bool = False
    """Whether samples without a final answer vote, together, for an answer that never passes."""
