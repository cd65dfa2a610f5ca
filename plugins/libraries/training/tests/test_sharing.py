from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.data.batch import Batch
from whet.data.model_info import ModelInfo
from whet_training.layout import pack
from whet_training.sharing import pair_cost, share

KINDS = ("pairs", "samples", "sft")


def work(batch: Batch) -> int:
    """Count the tokens that pass the model, by laying them out."""
    return pack(batch, "shared").tokens.size if batch["loss_mask"].any() else 0


def loads(shards) -> list[int]:
    return [work(shard) for shard in shards]


@given(
    seed=st.integers(0, 10_000),
    groups=st.integers(0, 9),
    ranks=st.integers(1, 6),
    kind=st.sampled_from(KINDS),
    dead=st.booleans(),
)
def test_every_sequence_has_one_rank_and_units_stay_together(seed, groups, ranks, kind, dead, demonstrations, drawn):
    batch = drawn(kind, groups, seed) if groups else demonstrations([])
    batch = batch.with_columns(row=np.arange(batch.sequences))
    live = np.random.default_rng(seed).random(batch.sequences) < 0.5 if dead else None
    shards = list(share(batch, ranks, "shared", 1e-3, live))
    assert len(shards) == ranks
    assert sorted(row for shard in shards for row in shard["row"].tolist()) == list(range(batch.sequences))
    assert sum(len(set(shard["unit"].tolist())) for shard in shards) == len(batch.units())
    for shard in shards:
        assert sorted(shard["group"].tolist()) == shard["group"].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_heaviest_rank_has_at_most_2_percent_more_than_the_mean(kind, ranks, drawn):
    for seed in range(3):
        found = loads(share(drawn(kind, 128, seed), ranks, "shared"))
        assert max(found) <= 1.02 * np.mean(found)


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=7), ranks=st.integers(2, 3))
def test_few_units_are_shared_out_nearly_as_well_as_can_be(sizes, ranks, demonstrations):
    best = min(
        max(sum(size for size, rank in zip(sizes, chosen, strict=True) if rank == one) for one in range(ranks))
        for chosen in product(range(ranks), repeat=len(sizes))
    )
    assert max(loads(share(demonstrations(sizes), ranks, "shared"))) <= 4 / 3 * best  # Graham 1969


def test_groups_stay_whole_where_they_can_and_are_cut_where_they_must(drawn):
    whole = list(share(drawn("samples", 64), 4, "shared"))
    assert sum(len(set(shard["group"].tolist())) for shard in whole) == 64
    cut = list(share(drawn("samples", 1), 4, "shared"))
    assert all(shard.sequences for shard in cut)
    assert max(loads(cut)) < 0.5 * work(drawn("samples", 1))


def test_a_prompt_that_is_computed_again_is_counted(demonstrations):
    # Prompts of 50, completions of 2: one group for each rank takes 58; any cut takes at least 50 more in all.
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    rows = demonstrations([52] * 8, groups)
    tokens = rows["tokens"].reshape(8, 53).copy()
    tokens[:, :50] = np.array(groups)[:, None]
    mask = np.tile(np.arange(53) >= 50, 8)
    batch = rows.with_columns(tokens=tokens.ravel(), loss_mask=mask, prompt_lengths=np.full(8, 50))
    assert loads(share(batch, 2, "shared")) == [58, 58]


def test_sequences_that_cannot_change_the_loss_cost_nothing(drawn):
    batch = drawn("samples", 64)
    live = batch["group"] % 4 == 0
    live_too = batch.with_columns(alive=live)
    shards = list(share(live_too, 4, "shared", live=live))
    found = [work(shard.where(shard["alive"])) for shard in shards]
    assert max(found) <= 1.02 * np.mean(found)
    assert max(shard.tokens for shard in shards) <= 1.1 * batch.tokens / 4


def test_long_sequences_cost_their_attention(demonstrations):
    batch = demonstrations([1000, 100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    even = [sorted(shard["lengths"].tolist()) for shard in share(batch, 2, "packed")]
    assert sorted(map(len, even)) == [1, 10]
    # With a pair for 1/100 of a token the long one costs 1000 + 5005, the others 100 + 50.5 each.
    sizes = sorted(shard.sequences for shard in share(batch.take([0, *[1] * 30]), 2, "packed", pair=0.01))
    assert sizes == [1, 30]


def test_a_pair_costs_the_operations_of_attention_over_those_of_a_token():
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "hidden_size": 8, "intermediate_size": 16, "vocab_size": 100,
    }  # fmt: skip
    # A layer multiplies a token by 4 x 8 x 8 + 3 x 8 x 16 numbers (and 16 of its norms), the head by 800; a pair is
    # 2 x 4 heads x 2 numbers, twice, in 2 layers.
    assert pair_cost(ModelInfo("", config)) == pytest.approx(2 * 2 * 2 * 8 / (2 * (2 * (256 + 384 + 16) + 800)))
    assert pair_cost(ModelInfo("", {"text_config": config})) == pair_cost(ModelInfo("", config))
    assert pair_cost(ModelInfo("", {"num_attention_heads": "four"})) == 0
