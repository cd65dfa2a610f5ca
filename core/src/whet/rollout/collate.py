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


def collate(groups: Sequence[Group], temperature: float, environments: Sequence[str]) -> Batch:
    """Return one batch of all sequences of the groups, in order.

    Per token: tokens int64, loss_mask bool, sampler_logprobs float32, version int32 (-1 where loss_mask is false). Per
    sequence: lengths, prompt_lengths, group (order of admission), episode (numbered through the batch), unit (the
    sequence itself), env int64 (index into `info["environments"]`), temperature, reward float32, `reward:NAME` float32
    for each named reward (nan where the episode lacks it; see `completed`), and stopped bool (false: the last response
    was cut by its length). Every sequence of an episode has the episode's reward. If groups have a greedy episode, each
    of their sequences has its reward as `greedy_reward` float32; the batch has nothing else of a greedy episode.
    """
    episodes = completed([episode for group in groups for episode in group.episodes])
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    forks = np.array([len(episode.trajectories) for episode in episodes], np.int64)
    sizes = np.array([len(group.episodes) for group in groups], np.int64)
    names = {name: index for index, name in enumerate(environments)}

    def spread(values: Sequence[Any] | NDArray[Any], dtype: type) -> NDArray[Any]:
        """Return a column [sequences] with each episode's value for all of its sequences."""
        return np.repeat(np.asarray(values, dtype), forks)

    greedy = [group.greedy.reward for group in groups if group.greedy is not None]
    rewards = {name: [episode.rewards.get(name, np.nan) for episode in episodes] for name in reward_names(episodes)}
    return Batch(
        per_token={
            "tokens": _joined(trajectories, "tokens", np.int64),
            "loss_mask": _joined(trajectories, "loss_mask", np.bool_),
            "sampler_logprobs": _joined(trajectories, "logprobs", np.float32),
            "version": _joined(trajectories, "versions", np.int32),
        },
        per_sequence={
            "lengths": np.array([len(t.tokens) for t in trajectories], np.int64),
            "prompt_lengths": np.array([t.prompt_length for t in trajectories], np.int64),
            "group": spread(np.repeat(np.array([group.index for group in groups], np.int64), sizes), np.int64),
            "episode": spread(np.arange(len(episodes)), np.int64),
            "unit": np.arange(len(trajectories), dtype=np.int64),
            "env": spread([names[episode.environment] for episode in episodes], np.int64),
            "temperature": np.full(len(trajectories), temperature, np.float32),
            "reward": spread([episode.reward for episode in episodes], np.float32),
            "stopped": np.array([t.stop == "stop" for t in trajectories], np.bool_),
            **({"greedy_reward": spread(np.repeat(greedy, sizes), np.float32)} if greedy else {}),
            **{f"reward:{name}": spread(values, np.float32) for name, values in rewards.items()},
        },
        info={"environments": tuple(environments)},
    )


def _joined(trajectories: Sequence[Trajectory], name: str, dtype: type) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(getattr(trajectory, name) for trajectory in trajectories)])


def reward_names(episodes: Sequence[Episode]) -> tuple[str, ...]:
    """Return the names of all rewards, in order of first appearance."""
    return tuple(dict.fromkeys(name for episode in episodes for name in episode.rewards))


def completed(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes, where an undecided episode has a reward of 0 for each name that its environment gives to
    others.
    """
    names: dict[str, dict[str, float]] = {}
    for episode in episodes:
        names.setdefault(episode.environment, {}).update(dict.fromkeys(episode.rewards, 0.0))
    return [
        evolve(episode, rewards={**names[episode.environment], **episode.rewards}) if episode.undecided else episode
        for episode in episodes
    ]


def response_length(episode: Episode) -> int:
    """Return the number of tokens that the model produced in an episode."""
    return sum(int(np.count_nonzero(trajectory.loss_mask)) for trajectory in episode.trajectories)


def rollout_metrics(groups: Sequence[Group], passing: "Mapping[str, Passing] | None" = None) -> dict[str, Metric]:
    """Return the metrics of finished groups.

    - reward/mean, and reward/NAME for each named reward
    - reward/std: mean over groups of the unbiased deviation within a group; 0: nothing is left to learn by comparison
    - reward/greedy: of greedy episodes, which no other metric counts
    - response_length/mean and /max: tokens that the model produced in an episode
    - response_length/cut: share of episodes with a response that was cut
    - turns/mean
    - pass_rate: share of episodes that pass

    `passing` maps each environment of the run to its criterion; without it there is no pass_rate. If it has several
    environments, each of them also has all these metrics of its own groups as ENVIRONMENT/METRIC.
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
    spreads = [group.rewards.std(ddof=1, dtype=np.float64) for group in groups if len(group.episodes) > 1]
    greedy = [group.greedy.reward for group in groups if group.greedy is not None]
    cut = sum(any(trajectory.stop != "stop" for trajectory in episode.trajectories) for episode in episodes)
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
        **({"reward/greedy": mean(sum(greedy), len(greedy))} if greedy else {}),
        "response_length/mean": mean(sum(lengths), count),
        "response_length/max": largest(max(lengths)),
        "response_length/cut": mean(cut, count),
        "turns/mean": mean(sum(episode.turns for episode in episodes), count),
        **({"pass_rate": mean(sum(passed), len(passed))} if passed else {}),
    }


def record(group: Group) -> list[dict[str, Any]]:
    """Return a row of builtins for each episode of a group, for `rollouts/` and `evaluations/` of the run folder."""
    return [_row(group.index, episode) for episode in group.episodes]


def _row(group: int, episode: Episode) -> dict[str, Any]:
    # Plain lists: for a few dozen tokens they are several times faster than a NumPy reduction.
    produced = [v for t in episode.trajectories for v in t.versions[t.loss_mask].tolist()]
    return {
        "group": group,
        "environment": episode.environment,
        "task": episode.task,
        "id": episode.task_id,
        "sample": episode.sample,
        "reward": episode.reward,
        "rewards": dict(episode.rewards),
        "turns": episode.turns,
        "response_length": len(produced),
        "stop": episode.trajectories[-1].stop,
        "versions": [min(produced), max(produced)],
        **({} if episode.answer is None else {"answer": episode.answer}),
        **({"undecided": list(episode.undecided)} if episode.undecided else {}),
        **({} if episode.gold is None else {"gold": episode.gold}),
        "messages": [{"role": role, "content": text} for role, text in episode.messages],
    }
