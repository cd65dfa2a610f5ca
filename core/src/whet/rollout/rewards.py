"""The rewards of an episode, each with its address: the episode, an agent, a sequence, a turn, or tokens of a turn.

The environment has two ways to set a reward:

given     returned by the environment, or by its `group_rewards`: every sequence has them
recorded  by `model.reward`: the sequences that the address includes have them
"""

from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from whet.data.records import Episode, SpanReward, Trajectory
from whet.errors import EpisodeError
from whet.interfaces.environment import LARGEST_REWARD


@frozen
class RecordedReward:
    """One recorded reward."""

    name: str
    value: float
    agent: str
    sequence: int | None = None
    """Number of the sequence in the episode. None: every sequence of the agent."""
    span: tuple[int, int] | None = None
    """The first token and the one after the last, as positions in the sequence. None: the whole sequence."""
    part: int = 0
    """The part of the sequence that has the span; see `Trajectory.part`."""


def total_reward(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of the named rewards. A name without a weight has weight 1."""
    total = float(sum(weights.get(name, 1.0) * value for name, value in rewards.items()))
    if not abs(total) <= LARGEST_REWARD:
        raise EpisodeError(f"its weighted rewards add up to {total:g}, wanted a finite number up to {LARGEST_REWARD:g}")
    return total


def addressed(
    sequences: Mapping[int, Sequence[Trajectory]],
    recorded: Sequence[RecordedReward],
    given: Mapping[str, float],
    weights: Mapping[str, float],
) -> tuple[tuple[Trajectory, ...], dict[str, float]]:
    """Return the sequences of an episode with their rewards, and the rewards of the episode.

    `sequences` maps the number of each sequence to its parts; see `Trajectory.part`. If no reward was recorded, the
    sequences have no rewards of their own. Otherwise the rewards of the episode are the means over its sequences.
    """
    if not recorded:
        return tuple(part for parts in sequences.values() for part in parts), dict(given)
    names = dict.fromkeys([*given, *(one.name for one in recorded)], 0.0)
    found = [_rewarded(parts, i, recorded, {**names, **given}, weights) for i, parts in sequences.items()]
    means = {name: sum((parts[0].rewards or {})[name] for parts in found) / len(found) for name in names}
    return tuple(part for parts in found for part in parts), means


def _rewarded(
    parts: Sequence[Trajectory], number: int, recorded: Sequence[RecordedReward], given: Mapping[str, float],
    weights: Mapping[str, float],
) -> list[Trajectory]:  # fmt: skip
    """Return the parts of a sequence. Each has the rewards of the whole sequence, and the spans of its own turns."""
    rewards, own = dict(given), [one for one in recorded if one.sequence == number]
    for one in recorded:
        if one.sequence == number or (one.sequence is None and one.agent == parts[0].agent):
            rewards[one.name] += one.value
    found, total = [], total_reward(rewards, weights)
    for part in parts:
        spans = tuple(
            SpanReward(one.name, one.value, *one.span, weights.get(one.name, 1.0))
            for one in own if one.span is not None and one.part == part.part
        )  # fmt: skip
        found.append(evolve(part, rewards=rewards, reward=total, spans=spans, apart=bool(own)))
    return found


def with_rewards(episode: Episode, further: Mapping[str, float], weights: Mapping[str, float]) -> Episode:
    """Return an episode with further rewards of the whole episode. Raise `EpisodeError` if it has one of them."""
    if taken := sorted(further.keys() & episode.rewards.keys()):
        raise EpisodeError(f"group_rewards gave the reward {taken[0]!r}, which the episode has already; rename one")
    added = total_reward(further, weights)
    sequences = [
        t if t.rewards is None else evolve(t, rewards={**t.rewards, **further}, reward=t.reward + added)
        for t in episode.trajectories
    ]
    rewards = {**episode.rewards, **further}
    return evolve(episode, trajectories=tuple(sequences), rewards=rewards, reward=total_reward(rewards, weights))
