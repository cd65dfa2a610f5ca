import json

import numpy as np
import pytest
from attrs import evolve

from whet.data.metrics import mean
from whet.data.records import Episode, Group, Trajectory
from whet.rollout.collate import collate, record, rollout_metrics
from whet.rollout.scoring import Passing


def trajectory(prompt: int, answer: int, stop: str = "stop", version: int = 2) -> Trajectory:
    mask = np.arange(prompt + answer) >= prompt
    return Trajectory(
        tokens=np.arange(prompt + answer) + 10 * answer,
        loss_mask=mask,
        logprobs=np.where(mask, -0.25, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        prompt_length=prompt,
        stop=stop,  # type: ignore[arg-type]
    )


def episode(environment: str, sample: int, rewards: dict[str, float], *trajectories: Trajectory) -> Episode:
    messages = (("user", "2+2?"), ("assistant", "\x1b[31m4"))
    total, turns = sum(rewards.values()), len(trajectories)
    return Episode(environment, 5, sample, trajectories, rewards, total, turns, messages, task_id="a.jsonl:6")


@pytest.fixture
def groups() -> list[Group]:
    return [
        Group(
            8,
            "sums",
            5,
            (
                episode("sums", 0, {"correct": 1.0, "format": 0.5}, trajectory(2, 3)),
                episode("sums", 1, {"correct": 0.0, "format": 0.5}, trajectory(2, 1, "length"), trajectory(4, 2)),
            ),
        ),
        Group(
            9,
            "games",
            5,
            (episode("games", 0, {"won": 2.0}, trajectory(1, 4)), episode("games", 1, {"won": 4.0}, trajectory(1, 2))),
        ),
    ]


def test_columns_stand_where_they_belong(groups: list[Group]) -> None:
    batch = collate(groups, {"games": 0.7, "sums": 0.7})
    assert batch["lengths"].tolist() == [5, 3, 6, 5, 3]
    assert batch["prompt_lengths"].tolist() == [2, 2, 4, 1, 1]
    assert batch["group"].tolist() == [8, 8, 8, 9, 9]
    assert batch["episode"].tolist() == [0, 1, 1, 2, 3]
    assert batch["unit"].tolist() == [0, 1, 2, 3, 4]
    assert batch["env"].tolist() == [1, 1, 1, 0, 0]
    assert batch.info["environments"] == ("games", "sums")
    assert batch.info["reward_weights"] == {}
    weights = {"games": {}, "sums": {"correct": 1.0, "format": 0.0}}
    assert collate(groups, {"games": 0.7, "sums": 0.7}, weights).info["reward_weights"] == weights
    assert batch["temperature"].tolist() == [np.float32(0.7)] * 5
    assert batch["reward"].tolist() == [1.5, 0.5, 0.5, 2.0, 4.0]
    np.testing.assert_array_equal(batch["reward:won"], np.array([np.nan] * 3 + [2, 4], np.float32))
    np.testing.assert_array_equal(batch["reward:correct"], np.array([1, 0, 0, np.nan, np.nan], np.float32))
    assert batch["stopped"].tolist() == [True, False, True, True, True]
    assert batch["tokens"][:8].tolist() == [30, 31, 32, 33, 34, 10, 11, 12]
    assert batch["version"][:5].tolist() == [-1, -1, 2, 2, 2]
    assert batch["sampler_logprobs"][:5].tolist() == [0, 0, -0.25, -0.25, -0.25]
    assert {name: batch[name].dtype.name for name in batch.columns} == {
        "tokens": "int64",
        "loss_mask": "bool",
        "sampler_logprobs": "float32",
        "version": "int32",
        "lengths": "int64",
        "prompt_lengths": "int64",
        "group": "int64",
        "episode": "int64",
        "unit": "int64",
        "env": "int64",
        "agent": "int64",
        "member": "int64",
        "temperature": "float32",
        "reward": "float32",
        "stopped": "bool",
        "reward:correct": "float32",
        "reward:format": "float32",
        "reward:won": "float32",
    }


def test_an_episode_that_ends_as_the_context_is_full_is_cut() -> None:
    group = Group(0, "sums", 5, (episode("sums", 0, {}, trajectory(2, 3, "context")),))
    assert collate([group], {"sums": 0.7})["stopped"].tolist() == [False]
    found = rollout_metrics([group])
    assert (found["response_length/cut"].number(), found["context_full"].number()) == (1.0, 1.0)


def test_metrics_are_over_episodes(groups: list[Group]) -> None:
    numbers = {name: metric.number() for name, metric in rollout_metrics(groups).items()}
    assert numbers == pytest.approx(
        {
            "reward/correct": 0.5,
            "reward/format": 0.5,
            "reward/won": 3.0,
            "reward/mean": (1.5 + 0.5 + 2 + 4) / 4,
            "reward/std": (np.std([1.5, 0.5], ddof=1) + np.std([2, 4], ddof=1)) / 2,
            "response_length/mean": (3 + 3 + 4 + 2) / 4,
            "response_length/max": 4,
            "response_length/cut": 1 / 4,
            "context_full": 0.0,
            "turns/mean": 5 / 4,
        }
    )
    assert rollout_metrics([]) == {}


def test_each_of_several_environments_has_metrics_of_its_own(groups: list[Group]) -> None:
    names = list(dict.fromkeys(group.environment for group in groups))
    assert len(names) == 2
    passing = {name: Passing() for name in names}
    found = rollout_metrics(groups, passing)
    whole = {name: metric.number() for name, metric in rollout_metrics(groups, {names[0]: Passing()}).items()}
    assert not any(name.startswith(tuple(f"{own}/" for own in names)) for name in whole)
    assert {name: metric.number() for name, metric in found.items() if name in whole} == {**whole, "pass_rate": 3 / 4}
    for own in names:
        alone = rollout_metrics([group for group in groups if group.environment == own], {own: passing[own]})
        assert {f"{own}/{name}": metric for name, metric in alone.items()} == {
            name: metric for name, metric in found.items() if name.startswith(f"{own}/")
        }
        assert {f"{own}/reward/mean", f"{own}/response_length/cut", f"{own}/pass_rate"} < set(found)
    # a step without a group of one of them has none of its metrics
    assert not any(name.startswith(f"{names[1]}/") for name in rollout_metrics(groups[:1], passing))


def test_an_episode_without_the_reward_that_decides_neither_passes_nor_fails(groups: list[Group]) -> None:
    passing = {group.environment: Passing("correct") for group in groups}
    assert rollout_metrics(groups, passing)["pass_rate"] == mean(1, 2)
    assert "pass_rate" not in rollout_metrics(groups, {name: Passing("other") for name in passing})


def test_records_are_json_and_keep_the_text(groups: list[Group]) -> None:
    rows = [row for group in groups for row in record(group)]
    assert json.loads(json.dumps(rows)) == rows
    assert rows[1] == {
        "group": 8,
        "environment": "sums",
        "task": 5,
        "id": "a.jsonl:6",
        "sample": 1,
        "reward": 0.5,
        "rewards": {"correct": 0.0, "format": 0.5},
        "turns": 2,
        "response_length": 3,
        "stop": "stop",
        "versions": [2, 2],
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "\x1b[31m4"}],
    }


def test_a_greedy_episode_gives_its_reward_and_nothing_else(groups: list[Group]) -> None:
    plain, columns = rollout_metrics(groups), collate(groups, {"games": 1.0, "sums": 1.0})
    likeliest = [
        episode("sums", 2, {"correct": 1.0}, trajectory(2, 9)),
        episode("games", 2, {"won": 3.0}, trajectory(1, 1)),
    ]
    beside = [evolve(group, greedy=one) for group, one in zip(groups, likeliest, strict=True)]
    batch, metrics = collate(beside, {"games": 1.0, "sums": 1.0}), rollout_metrics(beside)
    assert batch["greedy_reward"].tolist() == [1, 1, 1, 3, 3]
    assert set(batch.columns) - set(columns.columns) == {"greedy_reward"}
    assert batch["tokens"].tolist() == columns["tokens"].tolist()
    assert metrics.pop("reward/greedy").number() == 2.0
    assert {name: m.number() for name, m in metrics.items()} == {name: m.number() for name, m in plain.items()}
    assert [record(group) for group in beside] == [record(group) for group in groups]


def test_a_row_has_the_right_answer_where_the_task_has_one(groups):
    (row, *_) = record(groups[0])
    assert "gold" not in row
    known = evolve(groups[0], episodes=tuple(evolve(one, gold="4") for one in groups[0].episodes))
    assert [row["gold"] for row in record(known)] == ["4", "4"]


def test_an_answer_that_nobody_can_decide_about_is_wrong_by_every_reward_of_its_environment(
    groups: list[Group],
) -> None:
    sums, games = groups
    right, undecided = sums.episodes[0], evolve(sums.episodes[1], rewards={}, reward=0.0, undecided=("too much",))
    found = [evolve(sums, episodes=(right, undecided)), games]
    metrics = rollout_metrics(found, {"sums": Passing("correct")})
    assert (metrics["pass_rate"], metrics["reward/correct"], metrics["reward/won"]) == (
        mean(1, 2),
        mean(1, 2),
        mean(6, 2),
    )
    batch = collate(found, {"games": 0.7, "sums": 0.7})
    np.testing.assert_array_equal(batch["reward:correct"], np.array([1, 0, 0, np.nan, np.nan], np.float32))
    alone = rollout_metrics([evolve(sums, episodes=(undecided,))], {"sums": Passing("correct")})
    assert alone["pass_rate"] == mean(0, 1)


def test_columns_of_the_generator_come_along_and_are_filled_where_a_sequence_lacks_them() -> None:
    routed = np.arange(10, dtype=np.int16).reshape(5, 2)
    shares = np.linspace(0, 1, 3, dtype=np.float32)
    played = [
        evolve(trajectory(2, 3), columns={"routed_experts": routed}),
        evolve(trajectory(2, 1), columns={"shares": shares}),
    ]
    batch = collate([Group(0, "sums", 0, (episode("sums", 0, {"won": 1.0}, *played),))], {"sums": 1.0})
    assert batch["routed_experts"].tolist() == [*routed.tolist(), *[[-1, -1]] * 3]
    assert batch["routed_experts"].dtype == np.int16
    np.testing.assert_array_equal(batch["shares"], np.array([np.nan] * 5 + shares.tolist(), np.float32))
