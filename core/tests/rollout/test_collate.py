import json

import numpy as np
import pytest

from whet.data.records import Episode, Group, Trajectory
from whet.rollout.collate import collate, record, rollout_metrics


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
    batch = collate(groups, 0.7, ["games", "sums"])
    assert batch["lengths"].tolist() == [5, 3, 6, 5, 3]
    assert batch["prompt_lengths"].tolist() == [2, 2, 4, 1, 1]
    assert batch["group"].tolist() == [8, 8, 8, 9, 9]
    assert batch["episode"].tolist() == [0, 1, 1, 2, 3]
    assert batch["unit"].tolist() == [0, 1, 2, 3, 4]
    assert batch["env"].tolist() == [1, 1, 1, 0, 0]
    assert batch.info["environments"] == ("games", "sums")
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
        "temperature": "float32",
        "reward": "float32",
        "stopped": "bool",
        "reward:correct": "float32",
        "reward:format": "float32",
        "reward:won": "float32",
    }


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
            "turns/mean": 5 / 4,
        }
    )
    assert rollout_metrics([]) == {}


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
