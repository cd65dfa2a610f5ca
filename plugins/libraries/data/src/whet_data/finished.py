"""What a reward reads: a finished episode, as text and numbers. A reward is any component of the kind `rewards`."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import field, frozen

from whet.data.messages import Conversation


@frozen
class Finished:
    """A finished episode."""

    text: str
    """The model's last response in the episode's first sequence. It may be hostile, and of any length."""
    data: Mapping[str, Any] = field(factory=dict)
    """The task's data."""
    messages: Conversation = ()
    """The conversation of the first sequence."""
    tokens: int = 0
    """Tokens that the model produced in all turns."""
    cut: bool = False
    """Whether a response was cut by its length."""
    rewards: Mapping[str, float] = field(factory=dict)
    """Rewards that the episode has already, unweighted."""


class Reward(Protocol):
    """A reward, built as `target(config)`. It may have a method `close`."""

    def __call__(self, episode: Finished) -> float | Awaitable[float]:
        """Return the reward of one episode."""


@runtime_checkable
class GroupReward(Protocol):
    """A reward that compares the episodes of a group, in place of a `Reward`."""

    def of_group(self, episodes: Sequence[Finished]) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return the reward of each episode of a group."""
