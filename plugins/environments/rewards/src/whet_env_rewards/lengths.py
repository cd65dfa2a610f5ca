"""Rewards for the length of a response, in tokens of all turns."""

import math
from collections.abc import Sequence

import numpy as np

from whet.errors import EpisodeError
from whet_data.finished import Finished
from whet_env_rewards.config import CosineLengthConfig, GroupLengthConfig, OverlongConfig
from whet_ops.shaping import overlong_penalty


class Overlong:
    """DAPO's soft penalty: Yu et al. 2025, equation 13, section 3.4 (arXiv:2503.14476)."""

    def __init__(self, config: OverlongConfig) -> None:
        self._longest, self._buffer = config.longest, config.buffer

    def __call__(self, episode: Finished) -> float:
        """Return the penalty, from 0 down to -1."""
        return float(overlong_penalty(np.array([episode.tokens]), self._longest, self._buffer)[0])


class CosineLength:
    """Right responses are worth more when short, wrong ones when long.

        reward = end + (begin - end) / 2 * (1 + cos(pi * tokens / longest))

    Yeo et al. 2025, section 4.1 and appendix C.1 (arXiv:2502.03373). Beyond `longest` the reward stays at `end`.
    """

    def __init__(self, config: CosineLengthConfig) -> None:
        self._config = config

    def __call__(self, episode: Finished) -> float:
        """Return the reward."""
        config = self._config
        begin, end = config.right if _right(episode, config.decides) else config.wrong
        share = min(episode.tokens / config.longest, 1.0)
        return end + (begin - end) / 2 * (1 + math.cos(math.pi * share))


class GroupLength:
    """Lengths compared in a group: 0.5 - (tokens - shortest) / (longest - shortest), and for wrong ones at most 0.

    Kimi Team 2025, section 2.3.3 (arXiv:2501.12599). 0 for all if all have one length.
    """

    def __init__(self, config: GroupLengthConfig) -> None:
        self._decides = config.decides

    def of_group(self, episodes: Sequence[Finished]) -> Sequence[float]:
        """Return the reward of each episode of a group."""
        right = [_right(episode, self._decides) for episode in episodes]
        lengths = [episode.tokens for episode in episodes]
        shortest, longest = min(lengths), max(lengths)
        if shortest == longest:
            return [0.0] * len(episodes)
        shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
        return [share if well else min(0.0, share) for share, well in zip(shares, right, strict=True)]


def _right(episode: Finished, decides: str) -> bool:
    if decides not in episode.rewards:
        raise EpisodeError(
            f"there is no reward {decides!r} to decide what is right; there are {', '.join(episode.rewards)}. Name one "
            "of the environment, or one that stands before in the list"
        )
    return episode.rewards[decides] >= 1
