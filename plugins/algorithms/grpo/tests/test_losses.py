import math
from typing import Any

import numpy as np
import pytest
import torch

from whet.data.batch import Batch, from_sequences
from whet_grpo.config import ClippedPgConfig
from whet_grpo.losses import ClippedPg


@pytest.fixture
def batch() -> Batch:
    """Three answers of 1, 2 and 3 tokens; the last has advantage 0. The second has a turn of others in between."""
    masks = [[0, 1], [0, 1, 0, 1], [0, 1, 1, 1]]
    sequences = [{"tokens": range(len(m)), "loss_mask": np.array(m, bool)} for m in masks]
    made = from_sequences(sequences, prompt_lengths=[1, 1, 1])
    logprobs = np.where(made["loss_mask"], -1.0, 0.0).astype(np.float32)
    return made.with_columns(
        advantages=np.array([1, -2, 0], np.float32), sampler_logprobs=logprobs, old_logprobs=logprobs
    )


RATIOS = (1.5, 0.5, 1.1, 9.0, 9.0, 9.0)  # of the loss tokens in order
LOSSES = (-1.2, 1.6, 2.2)  # -min(1.5, 1.2), 2 max(0.5, 0.8), 2 max(1.1, 1.1); the others have advantage 0


def computed(config: ClippedPgConfig, batch: Batch) -> tuple[float, Any, Any]:
    torched = batch.map(torch.from_numpy)
    logprobs = torch.zeros(batch.tokens)
    logprobs[torched["loss_mask"]] = -1 + torch.log(torch.tensor(RATIOS))
    logprobs.requires_grad_()
    loss = ClippedPg(config)
    result = loss({"logprobs": logprobs}, torched)
    value = result.terms["policy"] / loss.counts(torched)["policy"]
    (gradient,) = torch.autograd.grad(value, logprobs)
    return float(value.detach()), gradient, result.metrics


def test_the_mean_over_tokens_counts_those_of_dead_sequences(batch: Batch) -> None:
    value, gradient, metrics = computed(ClippedPgConfig(), batch)
    assert value == pytest.approx(sum(LOSSES) / 6)
    # of the first two tokens clipping took the gradient away; the third has -ratio * A / count
    assert gradient[batch["loss_mask"]].tolist() == pytest.approx([0, 0, 2.2 / 6, 0, 0, 0])
    assert metrics["clip_fraction"].number() == pytest.approx(2 / 3)
    assert metrics["ratio/mean"].number() == pytest.approx((1.5 + 0.5 + 1.1) / 3)
    gaps = [abs(math.log(ratio)) for ratio in (1.5, 0.5, 1.1)]
    assert metrics["logprob_gap/mean"].number() == pytest.approx(sum(gaps) / 3)
    assert metrics["logprob_gap/max"].number() == pytest.approx(math.log(2))


def test_where_no_sequence_can_learn_the_gap_is_shown_all_the_same(batch: Batch) -> None:
    dead = batch.with_columns(advantages=np.zeros(batch.sequences, np.float32))
    value, gradient, metrics = computed(ClippedPgConfig(), dead)
    assert value == 0
    assert not gradient.any()
    assert metrics["ratio/mean"].number() == pytest.approx(sum(RATIOS) / 6)
    assert metrics["clip_fraction"].number() == 0
    assert metrics["logprob_gap/max"].number() == pytest.approx(math.log(9))


def test_the_mean_over_sequences_weighs_answers_alike(batch: Batch) -> None:
    value, _, _ = computed(ClippedPgConfig(aggregation="sequence"), batch)
    assert value == pytest.approx((-1.2 + (1.6 + 2.2) / 2 + 0) / 3)


def test_without_old_logprobs_the_ratio_is_exactly_1(batch: Batch) -> None:
    columns = {name: column for name, column in batch.per_token.items() if name != "old_logprobs"}
    value, gradient, metrics = computed(ClippedPgConfig(), Batch(columns, batch.per_sequence))
    assert value == pytest.approx((-1 + 2 + 2) / 6)
    assert gradient[batch["loss_mask"]].tolist() == pytest.approx([-1 / 6, 2 / 6, 2 / 6, 0, 0, 0])
    assert metrics["ratio/mean"].number() == 1.0
    assert metrics["clip_fraction"].number() == 0.0


def test_a_clip_higher_lets_good_tokens_rise_further(batch: Batch) -> None:
    value, gradient, _ = computed(ClippedPgConfig(clip_high=0.6), batch)
    assert value == pytest.approx((-1.5 + 1.6 + 2.2) / 6)
    assert float(gradient[1]) == pytest.approx(-1.5 / 6)


def test_entropy_is_reported_when_asked_for(batch: Batch) -> None:
    loss = ClippedPg(ClippedPgConfig(entropy=True))
    torched = batch.map(torch.from_numpy)
    entropy = torch.arange(float(batch.tokens))
    result = loss({"logprobs": torch.zeros(batch.tokens), "entropy": entropy}, torched)
    assert loss.outputs == ("logprobs", "entropy")
    assert result.metrics["entropy"].number() == pytest.approx((1 + 3 + 5) / 3)
