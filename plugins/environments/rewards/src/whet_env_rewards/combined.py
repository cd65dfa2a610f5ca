"""Rewards made of rewards: all of them, or any."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any as Anything

from whet.config.build import build_selection
from whet.config.messages import found_words
from whet.errors import DataError
from whet_data.finished import Finished, GroupReward
from whet_env_rewards.config import AllConfig, AnyConfig, RewardSection


class _Several:
    def __init__(self, config: AllConfig | AnyConfig) -> None:
        self._parts = [built(section) for section in config.of]
        if any(isinstance(part, GroupReward) for part in self._parts):
            raise DataError("a reward that compares the episodes of a group cannot be a part of `all-of` or `any-of`")

    async def _values(self, episode: Finished) -> Sequence[float]:
        return [await graded(part, episode) for part in self._parts]

    def close(self) -> None:
        """Close the parts."""
        for part in self._parts:
            closed(part)


class All(_Several):
    """The product of rewards."""

    async def __call__(self, episode: Finished) -> float:
        """Return the product."""
        return math.prod(await self._values(episode))


class Any(_Several):
    """The largest of several rewards."""

    async def __call__(self, episode: Finished) -> float:
        """Return the largest value."""
        return max(await self._values(episode))


def built(section: RewardSection) -> Anything:
    """Return the reward of a section."""
    return build_selection(section.component)


async def graded(reward: Anything, episode: Finished) -> float:
    """Return the value of a reward, which may be an async function."""
    value = reward(episode)
    return float(await value if inspect.isawaitable(value) else value)


async def compared(reward: GroupReward, episodes: Sequence[Finished]) -> list[float]:
    """Return the value of each episode of a group. Raises `TypeError` for values that have no order."""
    found = reward.of_group(episodes)
    values: Iterable[float] = await found if inspect.isawaitable(found) else found
    if isinstance(values, str | bytes | Mapping | Set):
        raise TypeError(f"`of_group` returned {found_words(values)}, wanted a list with a number for each episode")
    return list(values)


def closed(reward: object) -> None:
    """Close a reward that holds resources."""
    if (close := getattr(reward, "close", None)) is not None:
        close()
