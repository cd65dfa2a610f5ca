"""Both losses against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.data.batch import from_sequences
from whet_ops.algorithms.config import KlLossSection, LikelihoodSection
from whet_ppo.config import PpoClipConfig, ValueClipConfig
from whet_ppo.losses import PpoClip, ValueClip, clipped_value_error


def error_and_gradient(value, old, target, clip=0.2):
    given = torch.tensor([value], dtype=torch.float32, requires_grad=True)
    loss, clipped = clipped_value_error(given, torch.tensor([old]), torch.tensor([target]), clip)
    (gradient,) = torch.autograd.grad(loss.sum(), given)
    return float(loss.detach()), float(gradient), bool(clipped)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "gradient", "clipped"),
    [
        (0.6, 0.5, 1.0, 0.2, 0.08, -0.4, False),  # near: the squared error
        (0.9, 0.5, 1.0, 0.2, 0.045, 0.0, True),  # further than 0.7 towards the target: held there
        (0.1, 0.5, 1.0, 0.2, 0.405, -0.9, False),  # away from the target: never held
        (0.9, 0.5, 1.0, 0.0, 0.005, -0.1, False),  # no clipping
    ],
)
def test_hand_worked_errors(value, old, target, clip, loss, gradient, clipped):
    found = error_and_gradient(value, old, target, clip)
    assert found[:2] == pytest.approx((loss, gradient), abs=1e-6)
    assert found[2] is clipped


@given(*[st.floats(-50, 50, width=32)] * 3, st.floats(0.015625, 2, width=32))
def test_clipping_only_ever_makes_the_error_larger(value, old, target, clip):
    loss, gradient, clipped = error_and_gradient(value, old, target, clip)
    free, _, _ = error_and_gradient(value, old, target, 0.0)
    assert loss >= free
    assert math.isfinite(gradient)
    assert clipped == (loss > free) or loss == pytest.approx(free, rel=1e-6)


def test_shapes_must_be_alike():
    with pytest.raises(ValueError, match=r"found \(2,\), \(3,\), \(2,\)"):
        clipped_value_error(torch.zeros(2), torch.zeros(3), torch.zeros(2), 0.2)


@pytest.fixture
def batch():
    """Sequences of 2 and 1 loss tokens behind prompts, the first right and the second wrong, and one without any."""
    masks = [[0, 1, 1], [0, 1], [0, 0]]
    rows = [{"tokens": np.arange(len(m)) + 3, "loss_mask": np.array(m, bool)} for m in masks]
    made = from_sequences(rows, prompt_lengths=[1, 1, 2])
    zeros = np.zeros(made.tokens, np.float32)
    return made.with_columns(
        old_logprobs=np.where(made["loss_mask"], -1.0, 0).astype(np.float32),
        sampler_logprobs=np.where(made["loss_mask"], -1.25, 0).astype(np.float32),
        advantages=np.array([0, 1, -2, 0, 3, 0, 0], np.float32),
        old_values=zeros,
        returns=np.array([0, 1, 1, 0, -1, 0, 0], np.float32),
        reward=np.array([1, 0, 1], np.float32),
    )


def computed(loss, batch, **outputs):
    torched = batch.map(torch.from_numpy)
    leaves = {}
    for name, values in outputs.items():
        leaves[name] = torch.zeros(batch.tokens)
        leaves[name][torched["loss_mask"]] = torch.tensor(values)
        leaves[name].requires_grad_()
    result, counts = loss(leaves, torched), loss.counts(torched)
    value = sum(loss.weights[name] * term / counts[name] for name, term in result.terms.items())
    value.backward()
    gradients = {name: leaf.grad[torched["loss_mask"]].tolist() for name, leaf in leaves.items()}
    return float(value.detach()), gradients, {name: metric.number() for name, metric in result.metrics.items()}


LOGPROBS = [-1 + math.log(ratio) for ratio in (1.5, 1.1, 0.9)]
LOSSES = (-1.2, 2.2, -2.7)  # -min(1.5, 1.2), 2 x 1.1, -3 x 0.9


def test_every_token_has_its_own_advantage(batch):
    value, gradients, metrics = computed(PpoClip(PpoClipConfig()), batch, logprobs=LOGPROBS)
    assert value == pytest.approx(sum(LOSSES) / 3)
    assert gradients["logprobs"] == pytest.approx([0, 2.2 / 3, -2.7 / 3])
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["kl_old/k1"] == pytest.approx(-sum(math.log(r) for r in (1.5, 1.1, 0.9)) / 3)
    assert metrics["logprob_gap/max"] == pytest.approx(0.25)


def test_the_mean_over_sequences(batch):
    value, _, _ = computed(PpoClip(PpoClipConfig(aggregation="sequence")), batch, logprobs=LOGPROBS)
    assert value == pytest.approx(((-1.2 + 2.2) / 2 - 2.7) / 2)


def test_right_responses_are_made_likelier_and_others_not(batch):
    loss = PpoClip(PpoClipConfig(likelihood=LikelihoodSection(weight=0.5)))
    dead = batch.with_columns(advantages=np.zeros(batch.tokens, np.float32))
    value, gradients, metrics = computed(loss, dead, logprobs=LOGPROBS)
    mean = -(LOGPROBS[0] + LOGPROBS[1]) / 2
    assert value == pytest.approx(0.5 * mean)
    assert gradients["logprobs"] == pytest.approx([-0.25, -0.25, 0])
    assert metrics["likelihood"] == pytest.approx(mean)
    assert loss.live(dead.map(torch.from_numpy)).tolist() == [True, False, False]
    both, _, _ = computed(loss, batch, logprobs=LOGPROBS)
    assert both == pytest.approx(sum(LOSSES) / 3 + 0.5 * mean)


def test_where_nothing_is_right_the_term_counts_nothing(batch):
    loss = PpoClip(PpoClipConfig(likelihood=LikelihoodSection(weight=0.5, at_least=2.0)))
    assert loss.counts(batch.map(torch.from_numpy))["likelihood"] == 0


def test_a_bonus_raises_entropy(batch):
    loss = PpoClip(PpoClipConfig(entropy_weight=0.1))
    value, gradients, metrics = computed(loss, batch, logprobs=LOGPROBS, entropy=[1.0, 2.0, 3.0])
    assert value == pytest.approx(sum(LOSSES) / 3 - 0.1 * 2.0)
    assert gradients["entropy"] == pytest.approx([-0.1 / 3] * 3)
    assert metrics["entropy"] == pytest.approx(2.0)


def test_the_value_loss_of_a_batch(batch):
    value, gradients, metrics = computed(ValueClip(ValueClipConfig()), batch, values=[0.1, 0.5, -0.1])
    assert value == pytest.approx((0.9**2 + 0.8**2 + 0.9**2) / 2 / 3)
    assert gradients["values"] == pytest.approx([-0.9 / 3, 0, 0.9 / 3])
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["error"] == pytest.approx((0.9 + 0.5 + 0.9) / 3)


@pytest.mark.parametrize("log_ratio", [-50.0, 50.0])
def test_a_single_token_with_an_extreme_ratio_is_finite(batch, log_ratio):
    alone = batch.where([False, True, False])
    config = PpoClipConfig(clip_dual=3.0, likelihood=LikelihoodSection(weight=1.0, at_least=-1.0))
    value, gradients, metrics = computed(PpoClip(config), alone, logprobs=[-1.0 + log_ratio])
    assert math.isfinite(value)
    assert all(math.isfinite(number) for number in (*gradients["logprobs"], *metrics.values()))


@pytest.mark.parametrize("loss", [PpoClip, ValueClip])
def test_tokens_may_be_divided_by_a_constant_and_empty_sequences_counted(batch, loss):
    config = {PpoClip: PpoClipConfig, ValueClip: ValueClipConfig}[loss]
    torched = batch.map(torch.from_numpy)
    counts = [
        float(
            next(iter(loss(config(aggregation="constant", max_length=7, count_empty=empty)).counts(torched).values()))
        )
        for empty in (False, True)
    ]
    assert counts == [2 * 7, 3 * 7]


@pytest.mark.parametrize("importance", ["none", "score", "ratio", "sampler", "sequence"])
def test_a_penalty_in_the_loss_is_the_formula_written_out(batch, importance):
    reference = np.where(batch["loss_mask"], np.linspace(-1.5, -0.7, batch.tokens), 0).astype(np.float32)
    made = batch.with_columns(reference_logprobs=reference)
    section = KlLossSection(weight=0.3, importance=importance)
    value, gradients, metrics = computed(PpoClip(PpoClipConfig(kl=section)), made, logprobs=LOGPROBS)
    plain, slopes, _ = computed(PpoClip(PpoClipConfig()), batch, logprobs=LOGPROBS)
    new = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    d = new - torch.tensor(reference[made["loss_mask"]], dtype=torch.float64)
    mean = torch.stack([(new[:2] + 1).mean()] * 2 + [new[2] + 1])  # of the sequences of two tokens and of one
    logs = {"none": 0 * new, "score": new - new.detach(), "ratio": new + 1, "sampler": new + 1.25, "sequence": mean}
    expected = 0.3 * (logs[importance].exp() * ((-d).exp() - 1 + d)).mean()
    assert value - plain == pytest.approx(float(expected.detach()), rel=1e-4)
    (other,) = torch.autograd.grad(expected, new)
    found = [one - two for one, two in zip(gradients["logprobs"], slopes["logprobs"], strict=True)]
    assert found == pytest.approx(other.tolist(), rel=1e-3, abs=1e-6)
    assert metrics["kl_reference/k1"] == pytest.approx(float(d.detach().mean()), rel=1e-5)


def test_with_a_penalty_sequences_without_an_advantage_are_alive(batch):
    dead = batch.with_columns(advantages=np.zeros(batch.tokens, np.float32))
    loss = PpoClip(PpoClipConfig(kl=KlLossSection(weight=0.3)))
    assert loss.live(dead.map(torch.from_numpy)).tolist() == [True, True, False]


def test_a_right_response_is_right_without_its_penalty(batch):
    loss = PpoClip(PpoClipConfig(likelihood=LikelihoodSection(weight=0.5)))
    charged = batch.with_columns(reward=batch["reward"] - np.float32(0.1), task_reward=batch["reward"])
    assert loss.counts(charged.map(torch.from_numpy))["likelihood"] == 2
