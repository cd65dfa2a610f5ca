"""Loads of experts, worked by hand: two experts, of which one computes each token."""

import math

import numpy as np
import pytest
import torch

from whet.data.batch import from_sequences
from whet.errors import WhetError
from whet_training import routing
from whet_training.experts import ExpertsConfig

# probabilities 3/4, 1/4 and 1/2, 1/2, and padding
LOGITS = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0], [9.0, 0.0]])
CHOSEN, WEIGHTS = torch.tensor([[0], [0], [0]]), torch.tensor([1.0, 1.0, 0.0])
SQUARES = math.log(4) ** 2 + math.log(2) ** 2
ENTROPY = -0.75 * math.log(0.75) - 0.25 * math.log(0.25) + math.log(2)


def test_a_load_sums_over_the_tokens_that_count():
    found = routing.load(LOGITS, CHOSEN, WEIGHTS)
    assert found.chosen.tolist() == [2.0, 0.0]
    assert found.chances.tolist() == pytest.approx([1.25, 0.75])
    assert float(found.squares) == pytest.approx(SQUARES)
    assert float(found.entropy) == pytest.approx(ENTROPY)


def test_the_terms_of_layers_add_up_to_the_weighted_means_of_both_losses():
    config, found = ExpertsConfig(balance=0.3, z_loss=0.1), routing.load(LOGITS, CHOSEN, WEIGHTS)
    shares = routing.shares_of(config, found.chosen[None], 2.0)[0]
    one = routing.term(config, found, shares, tokens=2.0, scale=1 / 2.0, layers=2)
    # E sum f P = 2 (1 * 5/8 + 0 * 3/8), in each of two equal layers
    assert 2 * float(one) == pytest.approx(0.3 * 1.25 + 0.1 * SQUARES / 2)


def test_metrics_are_means_over_layers():
    sums = routing.Sums(2, 2, torch.device("cpu"))
    for layer in range(2):
        sums.add(layer, routing.load(LOGITS, CHOSEN, WEIGHTS), torch.tensor([2.0, 0.5, 1.0]))
    found = {name: one.number() for name, one in sums.metrics(sums.numbers(), 2.0, replay=True).items()}
    assert found == pytest.approx({
        "experts/load_max": 2.0, "experts/load_min": 0.0, "experts/idle": 0.5, "experts/entropy": ENTROPY / 2,
        "experts/balance_loss": 1.25, "experts/z_loss": SQUARES / 2, "routing/disagreement": 0.25,
        "routing/overruled": 0.5,
    })  # fmt: skip
    assert not sums.metrics(sums.numbers(), 0.0, replay=True)


def two_layers():
    """Return the loads of two layers: the second is the first with its experts exchanged, for another token."""
    return [
        routing.load(LOGITS, CHOSEN, WEIGHTS),
        routing.load(LOGITS.flip(1), 1 - CHOSEN, torch.tensor([0.0, 2.0, 0.0])),
    ]


@pytest.mark.parametrize("balance", [0.0, 0.3])
def test_the_metric_of_one_balance_over_all_layers_is_its_loss(balance):
    config = ExpertsConfig(balance=balance, balance_of="model")
    sums, loads = routing.Sums(2, 2, torch.device("cpu"), config), two_layers()
    shares = routing.shares_of(config, torch.stack([one.chosen for one in loads]), 2.0)
    for layer, one in enumerate(loads):
        sums.add(layer, one, None)
        if balance:
            sums.add_balance(one, shares[layer], 1 / 2.0)
    # each expert gets half of the tokens of both layers, so E sum f P = 2 (1/2 (5/8 + 1/2) / 2 + 1/2 (3/8 + 1/2) / 2)
    assert sums.metrics(sums.numbers(), 2.0, replay=False)["experts/balance_loss"].number() == pytest.approx(1.0)
    terms = [routing.term(config, one, f, 2.0, 1 / 2.0, 2) for one, f in zip(loads, shares, strict=True)]
    assert float(sum(terms)) == pytest.approx(balance * 1.0)


def test_the_metric_of_a_balance_over_micro_batches_is_the_mean_of_theirs():
    config = ExpertsConfig(balance=0.3, balance_over="micro-batch")
    sums = routing.Sums(1, 2, torch.device("cpu"), config)
    for one in two_layers():  # here two micro-batches of one layer, with all tokens at one expert each
        sums.add(0, one, None)
        sums.add_balance(one, routing.shares_of(config, one.chosen[None], 2.0)[0], 1 / (2.0 * 2))
    found = sums.metrics(sums.numbers(), 4.0, replay=False)
    assert found["experts/balance_loss"].number() == pytest.approx((2 * 5 / 8 + 2 * 1 / 2) / 2)


def test_disagreement_counts_the_samplers_experts_that_are_not_among_the_chosen():
    chosen, own = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [0, 3]])
    sampled, at = torch.tensor([[1, 2], [3, 2], [-1, -1]]), torch.tensor([0, 1, 1])
    assert routing.disagreement(chosen, own, sampled, at).tolist() == [2.0, 0.5, 1.0]


def test_recorded_experts_are_those_of_layers_with_experts_and_of_tokens_that_enter():
    rows = [{"tokens": np.arange(3), "loss_mask": np.array([False, True, False])}]
    column = np.array([[0, 7, 1], [1, 7, 1], [0, 7, 0]], np.int16)  # the second layer is dense
    batch = from_sequences(rows, prompt_lengths=[1]).with_columns(routed_experts=column)
    ids = routing.by_layer(batch, [0, 2], 1, 3)
    assert routing.recorded_tokens(batch, ids, 2).tolist() == [[1, 0], [0, 1]]
    unknown = np.where(np.arange(3)[:, None, None] == 0, -1, ids)
    assert routing.recorded_tokens(batch, unknown, 2) is None
    with pytest.raises(WhetError, match=r"has shape \[3, 3\], wanted \[tokens, 4\]"):
        routing.by_layer(batch, [0, 1], 2, 4)
