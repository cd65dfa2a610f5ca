import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.data.batch import Batch, Shards, concatenate, from_sequences
from whet.errors import DataError

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def make(sizes: list[int], unit: list[int] | None = None) -> Batch:
    """Token k of sequence i is 100 i + k, so that whatever is cut out can be recognised."""
    rows = [np.arange(n) + 100 * i for i, n in enumerate(sizes)]
    sequences = [{"tokens": row, "loss_mask": row % 2 == 0, "twice": row * 2.0} for row in rows]
    return from_sequences(sequences, prompt_lengths=[n // 2 for n in sizes], unit=unit, group=unit)


def rows(batch: Batch) -> list[list[int]]:
    """The tokens of each sequence, by a loop."""
    found, at = [], 0
    for length in batch["lengths"]:
        found.append(batch["tokens"][at : at + length].tolist())
        at += int(length)
    return found


def test_columns_lie_one_sequence_after_another_without_padding():
    batch = make([3, 0, 2])
    assert batch["tokens"].tolist() == [0, 1, 2, 200, 201]
    assert batch["lengths"].tolist() == [3, 0, 2]
    assert (batch.tokens, batch.sequences) == (5, 3)
    assert [str(batch[name].dtype) for name in ("tokens", "loss_mask", "unit")] == ["int64", "bool", "int64"]


def test_an_empty_batch_is_a_batch():
    batch = from_sequences([], prompt_lengths=[])
    assert (batch.tokens, batch.sequences, batch.units()) == (0, 0, [])


def test_missing_and_unequal_columns_are_named():
    batch = make([2, 1])
    with pytest.raises(DataError, match="needs the per-token column 'loss_mask'"):
        Batch({"tokens": batch["tokens"]}, batch.per_sequence)
    with pytest.raises(DataError, match="needs the per-sequence column 'group'"):
        Batch(batch.per_token, {"lengths": batch["lengths"], "prompt_lengths": batch["lengths"]})
    with pytest.raises(DataError, match="'extra' has 2 entries for 3 tokens"):
        Batch({**batch.per_token, "extra": np.zeros(2)}, batch.per_sequence)
    with pytest.raises(KeyError, match="no column 'reward'; it has tokens"):
        batch["reward"]


def test_columns_are_added_without_changing_the_batch():
    batch = make([2, 1])
    more = batch.with_columns(reward=np.array([1.0, 0.0]), logprobs=np.zeros(3))
    assert "reward" in more.per_sequence
    assert "logprobs" in more.per_token
    assert "reward" not in batch
    with pytest.raises(DataError, match="'odd' has 7 entries; the batch has 2 sequences and 3 tokens"):
        batch.with_columns(odd=np.zeros(7))


def test_a_known_column_keeps_its_place_where_every_sequence_is_one_token():
    batch = make([1, 1]).with_columns(twice=np.array([5.0, 6.0]), reward=np.array([1.0, 0.0]))
    assert batch.per_token["twice"].tolist() == [5.0, 6.0]
    assert "reward" in batch.per_sequence


@given(lengths, st.data())
def test_taking_sequences_takes_their_tokens(sizes, data):
    batch = make(sizes)
    chosen = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=15))
    taken = batch.take(chosen)
    assert rows(taken) == [rows(batch)[i] for i in chosen]
    assert taken["twice"].tolist() == (taken["tokens"] * 2.0).tolist()
    assert taken["prompt_lengths"].tolist() == [sizes[i] // 2 for i in chosen]


@given(lengths, st.data())
def test_where_keeps_order(sizes, data):
    keep = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    assert rows(make(sizes).where(keep)) == [row for row, kept in zip(rows(make(sizes)), keep, strict=True) if kept]


@given(lengths, st.integers(1, 5), st.integers(0, 3))
def test_shards_hold_every_sequence_once_and_never_part_a_unit(sizes, parts, pair):
    unit = [i // (pair + 1) for i in range(len(sizes))]
    shards = make(sizes, unit).shard(parts)
    assert len(shards) == parts
    assert sorted(row for shard in shards for row in rows(shard)) == sorted(rows(make(sizes)))
    homes = [set(shard["unit"].tolist()) for shard in shards]
    assert sum(map(len, homes)) == len(set(unit))


def sharded_by_hand(batch: Batch, parts: int) -> list[list[int]]:
    """Positions of the sequences of each rank: each unit goes where the middle of its tokens falls."""
    units = sorted(batch.units(), key=lambda unit: int(batch["group"][unit[0]]))
    tokens = [int(batch["lengths"][unit].sum()) for unit in units]
    homes: list[list[int]] = [[] for _ in range(parts)]
    for number, unit in enumerate(units):
        middle = sum(tokens[:number]) + tokens[number] / 2
        homes[min(int(middle * parts / max(sum(tokens), 1)), parts - 1)] += unit.tolist()
    return homes


@given(st.data(), st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(2, 40))
def test_shards_are_contiguous_in_order_of_group_whatever_the_order_of_the_batch(data, sizes, parts):
    unit = data.draw(st.lists(st.integers(0, 8), min_size=len(sizes), max_size=len(sizes)))
    batch = make(sizes, unit)
    batch = batch.with_columns(group=np.array(data.draw(st.lists(st.integers(0, 3), min_size=9, max_size=9)))[unit])
    shards = batch.shard(parts)
    for chosen, shard in zip(sharded_by_hand(batch, parts), shards, strict=True):
        expected = batch.take(np.array(chosen, np.int64))
        for name in batch.columns:
            assert shard[name].dtype == expected[name].dtype
            assert shard[name].tolist() == expected[name].tolist()


def test_shards_must_be_of_all_sequences():
    with pytest.raises(ValueError, match="3 sequences in all of a batch of 2"):
        Shards(make([1, 1]), (1, 2))


def test_an_empty_batch_has_empty_shards():
    assert [shard.sequences for shard in from_sequences([], prompt_lengths=[]).shard(3)] == [0, 0, 0]


def test_shards_are_balanced_by_tokens():
    sizes = [50, 1, 1, 1, 1, 1, 1, 1, 1, 42]
    left, right = make(sizes).shard(2)
    assert abs(left.tokens - right.tokens) < 20


@given(lengths, st.integers(0, 9))
def test_minibatches_hold_every_unit_once(sizes, seed):
    unit = [i // 2 for i in range(len(sizes))]
    batch = make(sizes, unit)
    parts = batch.split(len(set(unit)), seed=seed)
    assert sorted(row for part in parts for row in rows(part)) == sorted(rows(batch))
    assert all(len(set(part["unit"].tolist())) == 1 for part in parts)


def test_minibatches_depend_on_the_seed_alone():
    batch = make([2] * 30)
    orders = [[rows(part) for part in batch.split(3, seed=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert [row for part in batch.split(3) for row in rows(part)] == rows(batch)


def test_too_many_minibatches_are_refused():
    with pytest.raises(DataError, match="cannot split 2 units into 3"):
        make([1, 1, 1], unit=[0, 0, 1]).split(3)


def test_units_need_not_be_neighbours():
    units = make([1, 2, 3, 4], unit=[7, 3, 7, 3]).units()
    assert [unit.tolist() for unit in units] == [[0, 2], [1, 3]]


@given(lengths, lengths)
def test_joining_appends(one, two):
    joined = concatenate([make(one), make(two)])
    assert rows(joined) == rows(make(one)) + rows(make(two))


def test_map_reaches_every_column():
    doubled = make([2, 1]).map(lambda column: column.astype(np.float64))
    assert {doubled[name].dtype for name in doubled.columns} == {np.dtype(np.float64)}
