import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.data.batch import Batch, from_sequences
from whet_training.layout import pack, used_lengths
from whet_training.packing import Costs, plan

KINDS = ("pairs", "samples", "sft")


def next_fit(batch: Batch, budget: int) -> int:
    """Count the micro-batches if each unit goes into the last one where it fits, by laying them out."""
    count, last = 0, np.zeros(0, np.int64)
    for unit in sorted(batch.units(), key=lambda unit: int(batch["group"][unit[0]])):
        joined = np.concatenate([last, unit])
        fits = len(last) > 0 and pack(batch.take(joined), "shared").tokens.size <= budget
        last = joined if fits else unit
        count += not fits
    return count


def test_first_fit_decreasing_fills_the_micro_batches_that_next_fit_leaves_half_empty(demonstrations):
    parts = plan(demonstrations([6, 5, 6, 5, 4, 5, 4, 5]), "shared", 10)
    assert [sorted(part.tolist()) for part in parts] == [[0, 4], [2, 6], [1, 3], [5, 7]]
    assert next_fit(demonstrations([6, 5, 6, 5, 4, 5, 4, 5]), 10) == 6


def test_a_batch_that_fits_is_one_micro_batch_in_order_of_group(demonstrations):
    (part,) = plan(demonstrations([3, 9, 1, 4], group=[2, 0, 1, 0]), "shared", 17)
    assert part.tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize(("kind", "groups"), [("sft", 300), ("pairs", 150), ("samples", 40)])
def test_there_are_fewer_micro_batches_than_by_next_fit_and_hardly_more_than_there_must_be(kind, groups, drawn):
    counts, before, least = 0, 0, 0
    for seed in range(3):
        batch = drawn(kind, groups, seed)
        counts += len(plan(batch, "shared", 512))
        before += next_fit(batch, 512)
        least += -(-pack(batch, "shared").tokens.size // 512)
    assert counts <= 0.95 * before
    assert counts <= 1.06 * least + 3


@given(seed=st.integers(0, 10_000), budget=st.integers(20, 2000), kind=st.sampled_from(KINDS))
def test_never_are_there_more_micro_batches_than_by_next_fit(seed, budget, kind, drawn):
    batch = drawn(kind, 4, seed)
    assert len(plan(batch, "shared", budget)) <= next_fit(batch, budget)


@given(seed=st.integers(0, 10_000), budget=st.integers(20, 2000), kind=st.sampled_from(KINDS))
def test_what_a_micro_batch_costs_is_what_is_laid_out(seed, budget, kind, drawn):
    batch = drawn(kind, 4, seed)
    units = sorted(batch.units(), key=lambda unit: int(batch["group"][unit[0]]))
    costs = Costs.of(batch, units, used_lengths(batch), "shared")
    sizes = []
    for part in costs.pieces(budget):
        rows = np.concatenate([units[number] for number in part.units])
        sizes.append(costs.total(part))
        laid_out = pack(batch.take(rows), "shared").tokens.size
        # a completion that begins another one is not laid out again, which happens to the shortest
        assert laid_out <= sizes[-1] <= laid_out + 8 * len(rows)
        assert sizes[-1] <= budget or len(part.units) == 1
    found = [pack(batch.take(part), "shared").tokens.size for part in plan(batch, "shared", budget)]
    assert len(found) < 2 or found[0] >= found[-1]


def test_a_group_is_kept_together_where_that_costs_no_micro_batch(drawn):
    batch = drawn("samples", 40)
    parts = plan(batch, "shared", 100_000)
    assert len(parts) == 1
    parts = plan(batch, "shared", 2048)
    homes = [{number for number, part in enumerate(parts) if g in batch["group"][part]} for g in range(40)]
    assert sum(len(home) - 1 for home in homes) <= len(parts)


def test_attention_costs_a_pair_for_each_key_that_a_query_reads():
    rows = [{"tokens": [1, 2, 3, *rest, 9], "loss_mask": [0, 0, 0] + [1] * (len(rest) + 1)} for rest in ([4, 5], [6])]
    batch = from_sequences(rows, prompt_lengths=[3, 3], group=[0, 0])
    costs = Costs.of(batch, batch.units(), used_lengths(batch), "shared", pair=0.5)
    # the prompt: 3 tokens, 1 + 2 + 3 keys; completions of 2 and 1 tokens read 4 + 5 and 4 keys
    assert costs.prompts == {0: 3 + 0.5 * 6}
    assert [unit.own for unit in costs.units] == [2 + 0.5 * 9, 1 + 0.5 * 4]
    apart = Costs.of(batch, batch.units(), used_lengths(batch), "packed", pair=0.5)
    assert [apart.total(unit) for unit in apart.units] == [5 + 0.5 * 15, 4 + 0.5 * 10]
