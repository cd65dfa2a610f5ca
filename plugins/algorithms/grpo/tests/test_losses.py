import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import asdict, evolve

from whet.component import Spec
from whet.data.batch import Batch, from_sequences
from whet.data.metrics import histogram_rows, merge, plain
from whet_grpo.config import ClippedPgConfig, GspoConfig
from whet_grpo.losses import ClippedPg, Gspo
from whet_ops.algorithms.config import CorrectionSection, KlLossSection
from whet_ops.algorithms.corrected_loss import Corrected


@pytest.fixture
def batch() -> Batch:
    """Three responses of 1, 2 and 3 tokens; the last has advantage 0. The second has a turn of others in between."""
    masks = [[0, 1], [0, 1, 0, 1], [0, 1, 1, 1]]
    sequences = [{"tokens": range(len(m)), "loss_mask": np.array(m, bool)} for m in masks]
    made = from_sequences(sequences, prompt_lengths=[1, 1, 1])
    logprobs = np.where(made["loss_mask"], -1.0, 0.0).astype(np.float32)
    made = made.with_columns(
        advantages=np.array([1, -2, 0], np.float32), sampler_logprobs=logprobs, old_logprobs=logprobs
    )
    return evolve(made, info={"old_logprobs": "sampler"})


RATIOS = (1.5, 0.5, 1.1, 9.0, 9.0, 9.0)  # of the loss tokens in order
LOSSES = (-1.2, 1.6, 2.2)  # -min(1.5, 1.2), 2 max(0.5, 0.8), 2 max(1.1, 1.1); the others have advantage 0


def computed(config: Any, batch: Batch, kind: Any = ClippedPg) -> tuple[float, Any, Any]:
    torched = batch.map(torch.from_numpy)
    logprobs = torch.zeros(batch.tokens)
    logprobs[torched["loss_mask"]] = -1 + torch.log(torch.tensor(RATIOS))
    logprobs.requires_grad_()
    loss = kind(config)
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
    (row,) = histogram_rows(metrics)
    assert {edge: count for edge, count in zip(row["edges"], row["counts"][1:], strict=True) if count} == {
        0.0625: 1,  # |log 1.1|
        0.25: 1,  # |log 1.5|
        0.5: 1,  # |log 0.5|
    }


def test_where_no_sequence_can_learn_the_gap_is_shown_all_the_same(batch: Batch) -> None:
    dead = batch.with_columns(advantages=np.zeros(batch.sequences, np.float32))
    value, gradient, metrics = computed(ClippedPgConfig(), dead)
    assert value == 0
    assert not gradient.any()
    assert metrics["ratio/mean"].number() == pytest.approx(sum(RATIOS) / 6)
    assert metrics["clip_fraction"].number() == 0
    assert metrics["logprob_gap/max"].number() == pytest.approx(math.log(9))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_of_a_corrected_loss_do_not_depend_on_micro_batches(batch: Batch, level: str) -> None:
    """The second response is outside of the bounds. It can have no gradient, which only the pass itself finds out."""
    spec = Spec("whet_grpo.losses:ClippedPg", "whet_grpo.config:ClippedPgConfig", {})
    loss = Corrected({"loss": asdict(spec), "correction": asdict(CorrectionSection(mask=level))})
    gap = np.array([0, 0.5, 0, 3, 0, 2, 0, 0, 0, 0], np.float32)
    given = batch.where(batch["advantages"] != 0).with_columns(sampler_logprobs=(-1 - gap)[:6].astype(np.float32))
    found = []
    for parts in ([0, 1],), ([0], [1]):
        micro = [given.take(part).map(torch.from_numpy) for part in parts]
        results = [loss({"logprobs": torch.where(part["loss_mask"], -1.0, 0.0)}, part) for part in micro]
        merged = merge([result.metrics for result in results])
        found.append({name: merged[name].number() for name in plain(merged)})
    assert found[1] == found[0]
    assert found[0]["logprob_gap/max"] == 3
    assert found[0]["logprob_gap/mean"] == pytest.approx((0.5 + 3 + 2) / 3)
    assert found[0]["correction/masked"] == pytest.approx(2 / 3)


def test_the_mean_over_sequences_weighs_responses_alike(batch: Batch) -> None:
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


@pytest.mark.parametrize(
    ("section", "mean"),
    [
        ({}, (1 + 3 + 5 + 7 + 8 + 9) / 6),
        ({"aggregation": "sequence"}, (1 + (3 + 5) / 2 + (7 + 8 + 9) / 3) / 3),
        ({"aggregation": "constant", "max_length": 10}, (1 + 3 + 5 + 7 + 8 + 9) / 30),
        ({"aggregation": "sequence", "entropy_mean": "token"}, (1 + 3 + 5 + 7 + 8 + 9) / 6),
        ({"aggregation": "constant", "max_length": 10, "entropy_mean": "token"}, (1 + 3 + 5 + 7 + 8 + 9) / 6),
    ],
)
@pytest.mark.parametrize(("kind", "of"), [(ClippedPg, ClippedPgConfig), (Gspo, GspoConfig)])
def test_a_bonus_raises_the_entropy_of_all_responses(
    batch: Batch, kind: Any, of: Any, section: dict[str, Any], mean: float
) -> None:
    loss = kind(of(**{"aggregation": "token", **section}, entropy_weight=0.1))
    torched = batch.map(torch.from_numpy)
    entropy = torch.arange(float(batch.tokens)).requires_grad_()
    result = loss({"logprobs": torch.zeros(batch.tokens), "entropy": entropy}, torched)
    value = loss.weights["entropy"] * result.terms["entropy"] / loss.counts(torched)["entropy"]
    assert float(value.detach()) == pytest.approx(-0.1 * mean)
    value.backward()
    gradient: Any = entropy.grad
    assert (gradient[torched["loss_mask"]] < 0).all(), "also those of advantage 0"
    assert not gradient[~torched["loss_mask"]].any()


def test_a_penalty_is_a_term_of_its_own(batch: Batch) -> None:
    reference = np.where(batch["loss_mask"], -2.0, 0.0).astype(np.float32)
    torched = batch.with_columns(reference_logprobs=reference).map(torch.from_numpy)
    loss = ClippedPg(ClippedPgConfig(kl=KlLossSection(weight=0.5, estimator="k1")))
    logprobs = torch.from_numpy(batch["old_logprobs"]).requires_grad_()
    result = loss({"logprobs": logprobs}, torched)
    assert loss.weights == {"policy": 1.0, "kl": 0.5}
    assert loss.columns == ("advantages", "sampler_logprobs", "reference_logprobs")
    assert {name: int(count) for name, count in loss.counts(torched).items()} == {"policy": 6, "kl": 6}
    assert float(result.terms["kl"].detach()) == pytest.approx(6.0), "responses without an advantage are held back, too"
    assert loss.live(torched).tolist() == [True, True, True]
    assert result.metrics["kl_reference/k1"].number() == pytest.approx(1.0)
    assert result.metrics["kl_reference/k3"].number() == pytest.approx(math.exp(-1))


def test_metrics_of_the_ratio(batch: Batch) -> None:
    _, _, metrics = computed(ClippedPgConfig(), batch)
    numbers = {name: metric.number() for name, metric in metrics.items()}
    # ratios 1.5 (A = 1), 0.5 and 1.1 (A = -2): the first is too large, the second too small
    assert numbers["ratio/min"] == pytest.approx(0.5)
    assert numbers["ratio/max"] == pytest.approx(1.5)
    assert numbers["clip_fraction/high"] == numbers["clip_fraction/low"] == pytest.approx(1 / 3)
    changes = [math.log(ratio) for ratio in (1.5, 0.5, 1.1)]
    assert numbers["kl_old/k1"] == pytest.approx(-sum(changes) / 3)
    assert numbers["kl_old/k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in changes) / 3)


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_gspo_has_one_ratio_for_each_sequence(batch: Batch, level: Any) -> None:
    value, gradient, metrics = computed(GspoConfig(level=level, clip_low=0.3, clip_high=0.6), batch, Gspo)
    second = math.sqrt(0.5 * 1.1)
    assert value == pytest.approx((-1.5 + 2 * second) / 3, abs=1e-6)
    assert gradient[batch["loss_mask"]].tolist() == pytest.approx([-0.5, second / 3, second / 3, 0, 0, 0], rel=1e-5)
    assert metrics["ratio/min"].number() == pytest.approx(second)


def test_the_ratio_of_a_sequence_is_clipped_dually(batch: Batch) -> None:
    """The second response has advantage -2. Its ratio is made 4: its loss stops at 3 times 2, without a gradient."""
    torched = batch.map(torch.from_numpy)
    logprobs = torch.from_numpy(np.where(batch["loss_mask"], -1 + math.log(4), 0).astype(np.float32)).requires_grad_()
    loss = Gspo(GspoConfig(clip_dual=3.0))
    result = loss({"logprobs": logprobs}, torched)
    (gradient,) = torch.autograd.grad(result.terms["policy"], logprobs)
    assert float(result.terms["policy"].detach()) == pytest.approx(-(1 + 4e-4) + 3 * 2, rel=1e-5)
    assert not gradient.any()


def test_a_constant_does_not_favour_short_responses(batch: Batch) -> None:
    value, gradient, _ = computed(ClippedPgConfig(aggregation="constant", max_length=50), batch)
    assert value == pytest.approx(sum(LOSSES) / (3 * 50))
    assert float(gradient[5]) == pytest.approx(2.2 / 150)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_sequence_that_is_all_masked_does_not_count(batch: Batch, aggregation: Any) -> None:
    config = ClippedPgConfig(aggregation=aggregation, max_length=4)
    masked = batch.with_columns(loss_mask=batch["loss_mask"] & (np.arange(batch.tokens) < 6))
    alone = batch.take([0, 1])
    torched = masked.map(torch.from_numpy)
    assert ClippedPg(config).counts(torched) == ClippedPg(config).counts(alone.map(torch.from_numpy))


def test_advantages_of_tokens_weigh_each_by_itself(batch: Batch) -> None:
    per_token = np.repeat(batch["advantages"], batch["lengths"]) * np.array([1, 1, 1, 0, 1, 0.5, 1, 1, 1, 1])
    value, gradient, _ = computed(ClippedPgConfig(), batch.with_columns(advantages=per_token.astype(np.float32)))
    assert value == pytest.approx((-1.2 + 0 + 1.1) / 6)
    assert gradient[batch["loss_mask"]].tolist() == pytest.approx([0, 0, 1.1 / 6, 0, 0, 0])
