import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.data.batch import Batch, from_sequences
from whet_training.layout import Row, Rows, bins, pack, ranges, shared_prompts, used_lengths
from whet_training.packing import plan


def batch_of(seed: int, groups: int = 3, samples: int = 3, unit: int = 1) -> Batch:
    """Groups that share a prompt, answers of 0 to 6 tokens, often alike, with gaps in the loss mask."""
    draw = np.random.default_rng(seed)
    rows, prompts, group = [], [], []
    for g in range(groups):
        prompt = draw.integers(50, size=draw.integers(1, 6))
        for _ in range(samples):
            answer = draw.integers(2 if seed % 2 else 50, size=draw.integers(0, 7))
            mask = np.concatenate([np.zeros(len(prompt), bool), draw.random(len(answer)) < 0.7])
            rows.append({"tokens": np.concatenate([prompt, answer]), "loss_mask": mask})
            prompts.append(len(prompt))
            group.append(g)
    batch = from_sequences(rows, prompt_lengths=prompts, group=group)
    return batch.with_columns(unit=np.arange(batch.sequences) // unit)


def test_only_tokens_before_the_last_target_are_used():
    rows = [
        {"tokens": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 0, 0]},
        {"tokens": [1, 2], "loss_mask": [0, 0]},
        {"tokens": [7], "loss_mask": [1]},
        {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1]},
    ]
    assert used_lengths(from_sequences(rows, prompt_lengths=[2, 1, 1, 1])).tolist() == [2, 0, 0, 2]


def test_a_shared_prompt_stands_once_and_before_its_completions():
    rows = [
        {"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"tokens": [1, 2, 5], "loss_mask": [0, 0, 1]},
        {"tokens": [8, 9], "loss_mask": [0, 1]},
        {"tokens": [1, 2, 6, 7], "loss_mask": [0, 0, 1, 1]},
    ]
    row = pack(from_sequences(rows, prompt_lengths=[2, 2, 1, 2], group=[0, 0, 1, 0]), "shared")
    assert isinstance(row, Row)
    assert row.tokens.tolist() == [1, 2, 8, 3, 6]
    assert row.positions.tolist() == [0, 1, 0, 2, 2]
    assert row.lengths.tolist() == [2, 1, 1, 1]
    assert row.prefix.tolist() == [-1, -1, 0, 0]
    assert row.targets.tokens.tolist() == [3, 4, 5, 9, 6, 7]
    assert row.targets.source.tolist() == [1, 3, 1, 2, 1, 4]


def test_a_completion_that_begins_another_is_not_laid_out_again():
    rows = [
        {"tokens": [1, *answer], "loss_mask": [0] + [1] * len(answer)}
        for answer in ([4, 5, 6], [300, 5], [4, 5, 6, 7], [4, 5, 6], [4, 9], [300, 5, 2, 2])
    ]
    row = pack(from_sequences(rows, prompt_lengths=[1] * 6, group=[0] * 6), "shared")
    assert isinstance(row, Row)
    assert row.tokens.tolist() == [1, 4, 5, 6, 300, 5, 2]
    assert row.targets.source.tolist() == [0, 1, 2, 0, 4, 0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 4, 5, 6]
    assert row.targets.tokens[[2, 8, 13]].tolist() == [6, 7, 9]


@given(seed=st.integers(0, 10_000), layout=st.sampled_from(["shared", "packed", "padded"]))
def test_every_target_is_computed_from_the_token_before_it(seed, layout):
    batch = batch_of(seed)
    if not used_lengths(batch).any():
        return
    found = pack(batch, layout)
    tokens = found.tokens.ravel()
    starts = np.cumsum(batch["lengths"]) - batch["lengths"]
    owner = np.repeat(np.arange(batch.sequences), batch["lengths"])
    expected = np.flatnonzero(batch["loss_mask"])
    assert found.targets.where.tolist() == expected.tolist()
    assert tokens[found.targets.source].tolist() == batch["tokens"][expected - 1].tolist()
    assert found.targets.sequence.tolist() == owner[expected].tolist()
    if isinstance(found, Row):
        before = (expected - 1 - starts[owner[expected]]).tolist()
        assert found.positions[found.targets.source].tolist() == before
        assert len(found.tokens) == found.lengths.sum()


@given(seed=st.integers(0, 10_000))
def test_a_segment_and_its_prefix_are_the_sequence(seed):
    batch = batch_of(seed)
    row = pack(batch, "shared") if used_lengths(batch).any() else None
    if row is None:
        return
    assert isinstance(row, Row)
    place = np.cumsum(row.lengths) - row.lengths
    sequences = np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1])
    known = {tuple(s[:n].tolist()) for s in sequences for n in range(len(s) + 1)}
    for i, prefix in enumerate(row.prefix):
        mine = row.tokens[place[i] : place[i] + row.lengths[i]]
        before = row.tokens[place[prefix] : place[prefix] + row.lengths[prefix]] if prefix >= 0 else mine[:0]
        assert tuple(np.concatenate([before, mine]).tolist()) in known
        assert row.positions[place[i]] == len(before)


@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 80),
    unit=st.sampled_from([1, 2, 3]),
    layout=st.sampled_from(["shared", "packed", "padded"]),
)
def test_micro_batches_hold_whole_units_within_the_budget_and_lose_nothing(seed, budget, unit, layout):
    batch = batch_of(seed, unit=unit)
    used = used_lengths(batch)
    parts = plan(batch, layout, budget)
    chosen = np.concatenate(parts) if parts else np.zeros(0, int)
    assert len(set(chosen.tolist())) == len(chosen)
    for members in batch.units():
        assert len(set(members.tolist()) & set(chosen.tolist())) == (len(members) if used[members].any() else 0)
    for part in parts:
        owners = {int(batch["unit"][i]) for i in part}
        micro = batch.take(part)
        size = pack(micro, layout).tokens.size
        assert size <= budget or len(owners) == 1


def test_equal_prompts_of_different_groups_are_not_shared():
    rows = [{"tokens": [1, 2, 3], "loss_mask": [0, 0, 1]} for _ in range(2)]
    apart = from_sequences(rows, prompt_lengths=[2, 2], group=[0, 1])
    assert shared_prompts(apart, used_lengths(apart)).tolist() == [-1, -1]


def test_different_prompts_of_one_group_are_not_shared():
    rows = [{"tokens": [1, token, 3], "loss_mask": [0, 0, 1]} for token in (2, 5)]
    batch = from_sequences(rows, prompt_lengths=[2, 2], group=[0, 0])
    assert shared_prompts(batch, used_lengths(batch)).tolist() == [-1, -1]


def test_a_loss_that_falls_on_a_prompt_keeps_the_sequence_whole():
    rows = [{"tokens": [1, 2, 3], "loss_mask": [0, 1, 0]}, {"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 1]}]
    batch = from_sequences(rows, prompt_lengths=[3, 3], group=[0, 0])
    row = pack(batch, "shared")
    assert isinstance(row, Row)
    assert row.tokens.tolist() == [1, 1, 2, 3]
    assert row.targets.tokens.tolist() == [2, 4]


def test_padding_is_masked():
    rows = [{"tokens": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}, {"tokens": [5, 6], "loss_mask": [0, 1]}]
    found = pack(from_sequences(rows, prompt_lengths=[1, 1]), "padded")
    assert isinstance(found, Rows)
    assert found.tokens.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert found.mask.tolist() == [[True, True, True], [True, False, False]]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_bins_hold_each_segment_once_and_pad_little(lengths):
    found = bins(lengths)
    assert sorted(np.concatenate([one.members for one in found]).tolist()) == list(range(len(lengths)))
    for one in found:
        sizes = np.array(lengths)[one.members]
        assert sizes.max() == one.width
        assert (one.width <= sizes * 1.25 + 4).all()


def test_ranges_are_joined():
    assert ranges([5, 0, 2], [2, 0, 3]).tolist() == [5, 6, 2, 3, 4]


def test_a_batch_without_sequences_has_no_micro_batches():
    assert plan(batch_of(0).take([]), "shared", 10) == []


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_packing_saves_what_the_docstring_says(layout):
    batch = batch_of(7, groups=4, samples=4)
    packed, padded = pack(batch, layout).tokens.size, pack(batch, "padded").tokens.size
    assert packed < padded
