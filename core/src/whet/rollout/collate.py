"""Converts finished groups to a batch, to metrics and to records on disk."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from whet.data.batch import Batch
from whet.data.metrics import Metric, largest, mean
from whet.data.records import Episode, Group, Trajectory

if TYPE_CHECKING:
    from whet.rollout.scoring import Passing


def collate(
    groups: Sequence[Group],
    temperatures: Mapping[str, float],
    reward_weights: Mapping[str, Mapping[str, float]] | None = None,
) -> Batch:
    """Return one batch of all sequences of the groups, in order. `temperatures` has every environment of the run.

    `info["reward_weights"]` has the `reward_weights` of the environments, by the environment's name.

    Columns per token, besides those that the generator recorded:

    - tokens int64, loss_mask bool, sampler_logprobs float32
    - version int32: -1 where the model did not produce the token
    - turn int32, if a conversation has several turns of the model or spans have rewards: the number of the turn in its
      conversation, -1 outside of turns
    - span_rewards float32, if turns or spans have rewards: the weighted rewards, each at its last token

    Columns per sequence:

    - lengths, prompt_lengths, group (order of admission), episode (numbered through the batch), unit (the sequence)
    - env int64 (index into `info["environments"]`), agent int64 (index into `info["agents"]`), member int64
    - temperature float32, reward float32
    - `reward:NAME` float32 for each named reward, unweighted: nan where the episode lacks it; see `completed`
    - stopped bool: whether the last response ended by itself: it was not cut, and the context had room for the next
    - conversation int64 and share float32, if a chat template rewrote history, so that a conversation has several
      sequences (see `Trajectory.part`): the number of the conversation, and the sequence's part of the trained tokens
      of its conversation
    - greedy_reward float32, if groups have a greedy episode: the reward that the greedy episode of the group gives to
      the same agent. The batch has nothing else of greedy episodes

    `reward` is the sum of all rewards whose address includes the sequence, `span_rewards` included. All sequences of a
    conversation have the reward of the conversation. The sequences of one agent in an episode have the same `member`:
    they count once in a comparison. If an agent's sequences have rewards of their own in a group, each conversation of
    this agent in the group is a member.
    """
    episodes = completed([episode for group in groups for episode in group.episodes])
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    forks = np.array([len(episode.trajectories) for episode in episodes], np.int64)
    sizes = np.array([len(group.episodes) for group in groups], np.int64)
    names = {name: index for index, name in enumerate(temperatures)}

    def spread(values: Sequence[Any] | NDArray[Any], dtype: type) -> NDArray[Any]:
        """Return a column [sequences] with each episode's value for all of its sequences."""
        return np.repeat(np.asarray(values, dtype), forks)

    owners = list(zip((group for group in groups for _ in group.episodes), episodes, strict=True))
    rewards = {
        name: [(t.rewards or e.rewards).get(name, np.nan) for e in episodes for t in e.trajectories]
        for name in reward_names(episodes)
    }
    agents = tuple(dict.fromkeys(t.agent for t in trajectories))
    greedy = [_greedy_reward(g.greedy, t.agent) for g, e in owners if g.greedy is not None for t in e.trajectories]
    return Batch(
        per_token={
            "tokens": _joined(trajectories, "tokens", np.int64),
            "loss_mask": _joined(trajectories, "loss_mask", np.bool_),
            "sampler_logprobs": _joined(trajectories, "logprobs", np.float32),
            "version": _joined(trajectories, "versions", np.int32),
            **_turns(trajectories),
            **_recorded(trajectories),
        },
        per_sequence={
            "lengths": np.array([len(t.tokens) for t in trajectories], np.int64),
            "prompt_lengths": np.array([t.prompt_length for t in trajectories], np.int64),
            "group": spread(np.repeat(np.array([group.index for group in groups], np.int64), sizes), np.int64),
            "episode": spread(np.arange(len(episodes)), np.int64),
            "unit": np.arange(len(trajectories), dtype=np.int64),
            "env": spread([names[episode.environment] for episode in episodes], np.int64),
            "temperature": spread([temperatures[episode.environment] for episode in episodes], np.float32),
            "agent": np.array([agents.index(t.agent) for t in trajectories], np.int64),
            "member": _members(owners),
            "reward": np.array(
                [e.reward if t.rewards is None else t.reward for e in episodes for t in e.trajectories], np.float32
            ),
            "stopped": np.array([t.stop == "stop" for t in trajectories], np.bool_),
            **(_conversations(trajectories) if any(t.part for t in trajectories) else {}),
            **({"greedy_reward": np.array(greedy, np.float32)} if greedy else {}),
            **{f"reward:{name}": np.array(values, np.float32) for name, values in rewards.items()},
        },
        info={
            "environments": tuple(temperatures),
            "agents": agents,
            "reward_weights": {name: dict(weights) for name, weights in (reward_weights or {}).items()},
        },
    )


def _members(owners: Sequence[tuple[Group, Episode]]) -> NDArray[np.int64]:
    """Return the member of each sequence [sequences], numbered in the order of their first sequences."""
    numbers = dict[tuple[int, int | str], int]()
    apart = {(id(group), t.agent) for group, episode in owners for t in episode.trajectories if t.apart}
    keys = [
        (i, j - t.part if (id(group), t.agent) in apart else t.agent)
        for i, (group, episode) in enumerate(owners) for j, t in enumerate(episode.trajectories)
    ]  # fmt: skip
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _conversations(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """Return the columns `conversation` and `share` [sequences]."""
    conversation = np.cumsum([t.part == 0 for t in trajectories]) - 1
    trained = np.array([np.count_nonzero(t.loss_mask) for t in trajectories])
    return {"conversation": conversation, "share": shares(conversation, trained)}


def shares(conversation: NDArray[Any], trained: NDArray[Any]) -> NDArray[np.float32]:
    """Return what part of its conversation's trained tokens each sequence has: [sequences].

    The first part of a conversation without any has all of it. conversation, trained [sequences] are the number of the
    conversation and the trained tokens of each sequence, in the order of `collate`.
    """
    whole = np.bincount(conversation, trained)[conversation]
    first = np.append(True, conversation[1:] != conversation[:-1])[: len(conversation)]
    return np.where(whole > 0, trained / np.maximum(whole, 1), first).astype(np.float32)


def _greedy_reward(episode: Episode, agent: str) -> float:
    """Return the reward of a greedy episode for an agent: the mean over the agent's sequences."""
    own = [t.reward for t in episode.trajectories if t.agent == agent and t.rewards is not None and not t.part]
    return sum(own) / len(own) if own else episode.reward


def _turns(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """Return the columns `turn` and `span_rewards` [tokens], each only if the batch needs it."""
    ends = np.cumsum([0, *(len(t.tokens) for t in trajectories)])
    turn, rewards = np.full(ends[-1], -1, np.int32), np.zeros(ends[-1], np.float32)
    before = 0
    for start, trajectory in zip(ends, trajectories, strict=False):
        before = before if trajectory.part else 0
        for number, (begin, end) in enumerate(trajectory.turns, before):
            turn[start + begin : start + end] = number
        before += len(trajectory.turns)
        for span in trajectory.spans:
            rewards[start + span.end - 1] += span.weight * span.value
    several, placed = any(len(t.turns) > 1 or t.part for t in trajectories), any(t.spans for t in trajectories)
    return {**({"turn": turn} if several or placed else {}), **({"span_rewards": rewards} if placed else {})}


def _recorded(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """Return the columns [tokens, ...] that the generator recorded, -1 or NaN in sequences that lack them."""
    found = {name: column for t in trajectories for name, column in t.columns.items()}
    return {
        name: np.concatenate([
            t.columns[name] if name in t.columns
            else np.full((len(t.tokens), *one.shape[1:]), np.nan if one.dtype.kind == "f" else -1, one.dtype)
            for t in trajectories
        ])
        for name, one in found.items()
    }  # fmt: skip


def _joined(trajectories: Sequence[Trajectory], name: str, dtype: type) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(getattr(trajectory, name) for trajectory in trajectories)])


def reward_names(episodes: Sequence[Episode]) -> tuple[str, ...]:
    """Return the names of all rewards, in order of first appearance."""
    return tuple(dict.fromkeys(name for episode in episodes for name in episode.rewards))


def completed(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes, with a reward of 0 for each name that the environment gives only to other episodes.

    This holds for episodes that are undecided or out of context, and for environments that record rewards: there, a
    name that an episode does not record counts as 0. Any other episode is returned as it is.
    """
    names: dict[str, dict[str, float]] = {}
    for episode in episodes:
        names.setdefault(episode.environment, {}).update(dict.fromkeys(episode.rewards, 0.0))
    recording = {e.environment for e in episodes if any(t.rewards is not None for t in e.trajectories)}
    return [
        _filled(e, names[e.environment])
        if e.undecided or e.context_full or e.environment in recording else e
        for e in episodes
    ]  # fmt: skip


def _filled(episode: Episode, zeros: Mapping[str, float]) -> Episode:
    sequences = [t if t.rewards is None else evolve(t, rewards={**zeros, **t.rewards}) for t in episode.trajectories]
    return evolve(episode, trajectories=tuple(sequences), rewards={**zeros, **episode.rewards})


def response_length(episode: Episode) -> int:
    """Return the number of tokens that the model produced in an episode."""
    return sum(int(np.count_nonzero(trajectory.versions >= 0)) for trajectory in episode.trajectories)


def rollout_metrics(groups: Sequence[Group], passing: "Mapping[str, Passing] | None" = None) -> dict[str, Metric]:
    """Return the metrics of finished groups.

    - reward/mean, and reward/NAME for each named reward
    - reward/std: the unbiased standard deviation of the rewards that are compared, as the mean over groups and their
      agents; 0: there is nothing to learn from comparisons
    - reward/AGENT/mean: the mean reward of each named agent
    - reward/greedy: the mean reward of greedy episodes, which no other metric counts
    - response_length/mean and /max: tokens that the model produced in an episode
    - response_length/cut: share of episodes with a sequence whose last response was cut, or with a full context
    - context_full: share of episodes that requested a response when the context had no room for it
    - turns/mean
    - rewritten: share of episodes whose history the chat template rewrote; only where it did
    - pass_rate: share of episodes that pass

    `passing` maps each environment of the run to its criterion; without `passing` there is no pass_rate. If there are
    several environments, all these metrics also exist for the groups of each environment, as ENVIRONMENT/METRIC.
    """
    passing = passing or {}
    found = _metrics(groups, passing)
    for name in passing if len(passing) > 1 else ():
        own = _metrics([group for group in groups if group.environment == name], passing)
        found |= {f"{name}/{metric}": value for metric, value in own.items()}
    return found


def _metrics(groups: Sequence[Group], passing: "Mapping[str, Passing]") -> dict[str, Metric]:
    """Return the metrics of groups, over all their environments."""
    episodes = completed([episode for group in groups for episode in group.episodes])
    if not episodes:
        return {}
    count = len(episodes)
    lengths = [response_length(episode) for episode in episodes]
    compared = [rewards for group in groups for rewards in group.compared()]
    spreads = [rewards.std(ddof=1, dtype=np.float64) for rewards in compared if len(rewards) > 1]
    greedy = [group.greedy.reward for group in groups if group.greedy is not None]
    cut = sum(any(trajectory.stop != "stop" for trajectory in episode.trajectories) for episode in episodes)
    rewritten = sum(any(t.part for t in episode.trajectories) for episode in episodes)
    agents: dict[str, list[float]] = {}
    for played in episodes:
        for t in played.trajectories:
            if t.agent and not t.part:
                agents.setdefault(t.agent, []).append(played.reward if t.rewards is None else t.reward)
    named = {
        name: [episode.rewards[name] for episode in episodes if name in episode.rewards]
        for name in reward_names(episodes)
    }
    judged = [(passing[episode.environment], episode) for episode in episodes if episode.environment in passing]
    passed = [
        passes(episode) for passes, episode in judged if episode.undecided or passes.reward in ("", *episode.rewards)
    ]
    return {
        **{f"reward/{name}": mean(sum(values), len(values)) for name, values in named.items()},
        "reward/mean": mean(sum(episode.reward for episode in episodes), count),
        **({"reward/std": mean(float(sum(spreads)), len(spreads))} if spreads else {}),
        **{f"reward/{agent}/mean": mean(sum(values), len(values)) for agent, values in agents.items()},
        **({"reward/greedy": mean(sum(greedy), len(greedy))} if greedy else {}),
        "response_length/mean": mean(sum(lengths), count),
        "response_length/max": largest(max(lengths)),
        "response_length/cut": mean(cut, count),
        "context_full": mean(sum(episode.context_full for episode in episodes), count),
        **({"rewritten": mean(rewritten, count)} if rewritten else {}),
        "turns/mean": mean(sum(episode.turns for episode in episodes), count),
        **({"pass_rate": mean(sum(passed), len(passed))} if passed else {}),
    }


def record(group: Group) -> list[dict[str, Any]]:
    """Return a row of builtins for each episode of a group, for `rollouts/` and `evaluations/` of the run folder."""
    return [_row(group.index, episode) for episode in group.episodes]


def _row(group: int, episode: Episode) -> dict[str, Any]:
    recorded = any(t.rewards is not None for t in episode.trajectories)
    # Plain lists: for a few dozen tokens they are several times faster than a NumPy reduction.
    produced = [v for t in episode.trajectories for v in t.versions[t.versions >= 0].tolist()]
    return {
        "group": group, "environment": episode.environment, "task": episode.task, "id": episode.task_id,
        "sample": episode.sample, "reward": episode.reward, "rewards": dict(episode.rewards), "turns": episode.turns,
        "response_length": len(produced), "stop": episode.trajectories[-1].stop,
        "versions": [min(produced), max(produced)],
        **({} if episode.answer is None else {"answer": episode.answer}),
        **({"undecided": list(episode.undecided)} if episode.undecided else {}),
        **({} if episode.gold is None else {"gold": episode.gold}),
        **({} if episode.difficulty is None else {"difficulty": episode.difficulty}),
        **({"recorded": dict(episode.recorded)} if episode.recorded else {}),
        **({"addressed": [_addressed(t) for t in episode.trajectories]} if recorded else {}),
        "messages": [{"role": role, "content": content} for role, content in episode.messages],
    }  # fmt: skip


def _addressed(trajectory: Trajectory) -> dict[str, Any]:
    """Return the rewards of a sequence as builtins, and its rewards of turns with the number of the turn."""
    spans = [
        {"turn": number, "name": span.name, "value": span.value}
        for number, (begin, end) in enumerate(trajectory.turns)
        for span in trajectory.spans
        if begin <= span.begin < end
    ]
    rewards = dict(trajectory.rewards or {})
    return {"agent": trajectory.agent, "reward": trajectory.reward, "rewards": rewards, "turns": spans}
