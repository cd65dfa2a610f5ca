"""Some sequences of some steps are recorded token by token; nothing else changes."""

import json

import numpy as np
import pytest

from whet.config.sections import RecordSection
from whet.data.records import Episode, Group, Trajectory
from whet.rollout.collate import collate, record
from whet_ops.recorder import TokenRecorder


def trajectory(prompt: int, answer: int, version: int = 0) -> Trajectory:
    mask = np.arange(prompt + answer) >= prompt
    return Trajectory(
        tokens=np.arange(prompt + answer),
        loss_mask=mask,
        logprobs=np.where(mask, -0.1, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        prompt_length=prompt,
        stop="stop",
    )


def group(index: int, *episodes: tuple[Trajectory, ...]) -> Group:
    played = [Episode("sums", index, i, made, {"correct": 1.0}, 1.0, len(made)) for i, made in enumerate(episodes)]
    return Group(index, "sums", index, tuple(played))


@pytest.fixture
def groups() -> list[Group]:
    """Four groups of two episodes; the second episode of the first has two sequences."""
    first = group(10, (trajectory(2, 3),), (trajectory(2, 1), trajectory(4, 2)))
    return [first, *(group(i, (trajectory(1, 4),), (trajectory(1, 2),)) for i in (11, 12, 13))]


def pieces(tokens):
    return [f"<{token}>" for token in tokens.tolist()]


def played(groups, section=None, columns=None, step=1, score=None):
    """What is recorded of a step in which the algorithm adds columns."""
    batch = collate(groups, {"sums": 1.0})
    asked = []

    def trainer(part):
        asked.append(part)
        return np.where(part["loss_mask"], part["tokens"] / -64, 0).astype(np.float32)

    recorder = TokenRecorder(section or RecordSection(), score or trainer, pieces)
    recorder.taken(step, batch)
    rows = recorder.rows(groups, batch.with_columns(**(columns(batch) if columns else {})))()
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    return rows, asked


def test_the_first_groups_are_recorded_with_what_everybody_says_of_each_token(groups):
    rows, [asked] = played(groups, columns=lambda b: {"advantages": b["reward"] / 2, "weights": b["tokens"] * 0.5})
    assert [len(row.get("sequences", [])) for row in rows] == [1, 2, 1, 1, 0, 0, 0, 0]
    assert rows[1]["sequences"][1] == {
        "prompt_length": 4,
        "stop": "stop",
        "tokens": [0, 1, 2, 3, 4, 5],
        "pieces": ["<0>", "<1>", "<2>", "<3>", "<4>", "<5>"],
        "loss_mask": [0, 0, 0, 0, 1, 1],
        "versions": [-1, -1, -1, -1, 0, 0],
        "sampler_logprobs": [0, 0, 0, 0, -0.1, -0.1],
        "trainer_logprobs": [0, 0, 0, 0, -4 / 64, -5 / 64],
        "columns": {"advantages": 0.5, "weights": [0, 0.5, 1, 1.5, 2, 2.5]},
    }
    assert asked["group"].tolist() == [10, 10, 10, 11, 11]
    plain = [row for each in groups for row in record(each)]
    assert [{k: v for k, v in row.items() if k not in ("sequences", "advantage")} for row in rows] == plain
    assert [row["advantage"] for row in rows] == [0.5] * 8


@pytest.mark.parametrize(("every", "due"), [(10, [1, 10, 20]), (1, [*range(1, 21)]), (0, [])])
def test_the_first_step_and_every_so_many_are_recorded(groups, every, due):
    section = RecordSection(every=every)
    found = [step for step in range(1, 21) if "sequences" in played(groups, section, step=step)[0][0]]
    assert found == due


def test_a_step_that_is_not_due_costs_nothing(groups):
    assert played(groups, step=2)[1] == []


def test_what_one_step_records_is_bounded_by_tokens(groups):
    rows, [asked] = played(groups, RecordSection(groups=4, max_tokens=12))
    assert asked["lengths"].tolist() == [5, 3, 3]
    assert [len(row.get("sequences", [])) for row in rows] == [1, 1, 0, 1, 0, 0, 0, 0]
    assert played(groups, RecordSection(max_tokens=1)) == ([r for g in groups for r in record(g)], [])


def test_the_widest_gaps_are_recorded_too_where_the_whole_batch_was_scored(groups):
    def columns(batch):
        old = batch["sampler_logprobs"].copy()
        old[-1] -= 2.0  # the last sequence
        old[-5] -= 1.0  # the one before it
        return {"old_logprobs": old}

    rows, _ = played(groups, RecordSection(groups=1), columns)
    assert [len(row.get("sequences", [])) for row in rows] == [1, 2, 0, 0, 0, 0, 0, 1]
    gaps = np.subtract(*(rows[7]["sequences"][0][name] for name in ("sampler_logprobs", "trainer_logprobs")))
    assert gaps.max() == pytest.approx(2.0)
    assert len(rows[7]["sequences"][0]["columns"]["old_logprobs"]) == 3


def test_logprobs_of_the_sampler_are_not_taken_for_the_trainers(groups):
    rows, _ = played(groups, RecordSection(groups=1), lambda b: {"old_logprobs": b["sampler_logprobs"] * 1})
    assert [len(row.get("sequences", [])) for row in rows] == [1, 2, 0, 0, 0, 0, 0, 0]


def test_numbers_that_are_not_finite_become_null(groups):
    def score(part):
        return np.full(part.tokens, -np.inf, np.float32)

    rows, _ = played(groups, score=score)
    assert rows[0]["sequences"][0]["trainer_logprobs"] == [None] * 5


def test_a_batch_that_the_algorithm_cut_gives_no_columns(groups):
    batch = collate(groups, {"sums": 1.0})
    recorder = TokenRecorder(RecordSection(), None, pieces)
    recorder.taken(1, batch)
    cut = batch.take([0, 1]).with_columns(advantages=np.ones(2, np.float32))
    rows = recorder.rows(groups, cut)()
    assert rows[0]["sequences"][0]["columns"] == {}
    assert "trainer_logprobs" not in rows[0]["sequences"][0]


@pytest.mark.parametrize("step", [1, 2])
def test_every_episode_has_its_advantage_over_all_of_its_sequences(groups, step):
    def by_sequence(batch):
        return {"advantages": np.arange(batch.sequences, dtype=np.float32)}

    rows, _ = played(groups, columns=by_sequence, step=step)
    # the second episode has two sequences, of 1 and 2 trained tokens, with the advantages 1 and 2
    assert [row["advantage"] for row in rows] == [0.0, round(5 / 3, 6), 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]

    def by_token(batch):
        return {"advantages": np.where(batch["loss_mask"], batch["tokens"], 100).astype(np.float32)}

    rows, _ = played(groups, columns=by_token, step=step)
    assert [row["advantage"] for row in rows][:3] == [3.0, round((2 + 4 + 5) / 3, 6), 2.5]


def test_what_the_algorithm_says_of_other_sequences_is_no_advantage_of_these(groups):
    batch = collate(groups, {"sums": 1.0})
    recorder = TokenRecorder(RecordSection(every=0), None, pieces)
    assert not any("advantage" in row for row in recorder.rows(groups, batch)())
    some = batch.take([0, 1, 2]).with_columns(advantages=np.ones(3, np.float32))
    assert not any("advantage" in row for row in recorder.rows(groups, some)())
    odd = batch.with_columns(advantages=np.full(batch.sequences, np.nan, np.float32))
    assert [row["advantage"] for row in recorder.rows(groups, odd)()] == [None] * 8
