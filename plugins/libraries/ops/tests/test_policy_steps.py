"""Each stage from batch to batch, worked by hand."""

import json
import math
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.data.batch import Batch, from_sequences
from whet.data.metrics import histogram_rows
from whet_ops.aggregation import Aggregation, count, total
from whet_ops.algorithms.config import (
    CorrectionSection,
    CovarianceSection,
    KlControlSection,
    KlRewardSection,
    OverlongSection,
    TopEntropySection,
)
from whet_ops.algorithms.policy_steps import (
    advantage_metrics,
    clip_advantages,
    clip_rewards,
    correct_gap,
    keep_uncertain,
    mask_overlong,
    penalise_kl,
    penalise_overlong,
    place_correction,
    treat_covariance,
)
from whet_ops.correction import gap, importance_weights
from whet_ops.members import with_mask
from whet_testing.batches import random_batch
from whet_testing.fakes import FakeBackend


def batch(**columns: Any) -> Batch:
    """Return responses of 1, 2 and 3 tokens; the last two are sequences of one episode."""
    masks = [[0, 1], [0, 1, 1], [0, 1, 1, 1]]
    rows = [{"tokens": range(len(m)), "loss_mask": np.array(m, bool)} for m in masks]
    made = from_sequences(rows, prompt_lengths=[1, 1, 1], group=[0, 0, 0], episode=[0, 1, 1])
    logprobs = np.where(made["loss_mask"], -1.0, 0.0).astype(np.float32)
    given = {
        "reward": np.array([1, 3, 3], np.float32), "stopped": np.array([True, False, True]),
        "sampler_logprobs": logprobs, "old_logprobs": logprobs, "reference_logprobs": logprobs,
        "advantages": np.array([1, -2, 4], np.float32),
    }  # fmt: skip
    return made.with_columns(**{**given, **columns})


@pytest.mark.parametrize("stage", ["mask", "guard", "entropy"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("count_masked", [False, True])
def test_a_conversation_in_parts_that_loses_tokens_is_still_one_sequence_with_the_rest(
    stage: str, aggregation: Aggregation, count_masked: bool
) -> None:
    """The second conversation is lost whole, and the first loses a part of a part, or a whole part."""
    gone = {"mask": [3, 7, 8], "guard": [0, 1, 2, 7, 8], "entropy": [3, 4, 5, 7, 8]}[stage]
    logprobs, entropy = np.full(9, -1.0, np.float32), np.ones(9, np.float32)
    entropy[gone] = 0.0
    made = from_sequences(
        [{"tokens": range(n), "loss_mask": np.ones(n, bool)} for n in (3, 4, 2)], prompt_lengths=[0, 0, 0]
    )
    made = made.with_columns(
        conversation=np.array([0, 0, 1]), share=np.array([3 / 7, 4 / 7, 1], np.float32),
        advantages=np.ones(3, np.float32), old_logprobs=logprobs,
        sampler_logprobs=np.where(entropy > 0, logprobs, logprobs - 9).astype(np.float32),
    )  # fmt: skip
    if stage == "entropy":
        backend = FakeBackend(lambda output, batch: entropy)
        found, _ = keep_uncertain(made, backend, TopEntropySection(share=4 / 9, count_rest=False))
    else:
        masks = {"mask": "token", "count_masked": False} if stage == "mask" else {"max_token_gap": 5.0}
        found, _ = correct_gap(made, CorrectionSection(**masks))
    mask, lengths, share = (np.asarray(found[name]) for name in ("loss_mask", "lengths", "share"))
    assert np.flatnonzero(~mask).tolist() == gone
    values, sampled = np.where(mask, np.arange(1.0, 10.0), 0.0), np.ones(9, bool)
    in_parts, in_one = (
        (
            total(values, mask, sizes, aggregation, part),
            count(mask, sizes, aggregation, 5, count_masked=count_masked, sampled=sampled, share=part),
        )
        for sizes, part in ((lengths, share), (np.array([7, 2]), None))
    )
    np.testing.assert_allclose(in_parts, in_one, rtol=1e-6)


def tokens(*values: float) -> Any:
    return np.array(values, np.float32)


def test_cut_sequences_leave_the_loss_and_their_reward_stays() -> None:
    found, metrics = mask_overlong(batch(), OverlongSection(mask=True))
    assert found["loss_mask"].tolist() == [0, 1, 0, 0, 0, 0, 1, 1, 1]
    assert found["reward"].tolist() == [1, 3, 3]
    assert metrics["overlong/masked"].number() == pytest.approx(1 / 3)


@pytest.mark.parametrize("stopped", [[True, True, False], [True, False, True]])
def test_a_conversation_in_parts_leaves_the_loss_as_a_whole_if_its_last_response_is_cut(stopped: list[bool]) -> None:
    parts = batch(conversation=np.array([0, 1, 1]), stopped=np.array(stopped))
    found, metrics = mask_overlong(parts, OverlongSection(mask=True))
    assert found["loss_mask"].tolist() == [0, 1, 0, *([stopped[-1]] * 2), 0, *([stopped[-1]] * 3)]
    assert metrics["overlong/masked"].number() == (not stopped[-1]) / 2


def test_an_episodes_length_is_that_of_all_its_responses() -> None:
    section = OverlongSection(penalty=2.0, buffer=4)
    found, metrics = penalise_overlong(batch(), section, max_tokens=6)
    # 1 token: nothing; 2 + 3 tokens: (6 - 4 - 5) / 4 of the penalty of 2
    assert found["reward"].tolist() == [1, 1.5, 1.5]
    assert found["reward:overlong"].tolist() == [0, -1.5, -1.5]
    assert metrics["reward/overlong"].number() == pytest.approx(-1)
    given_length, _ = penalise_overlong(batch(), evolve(section, length=60), max_tokens=6)
    assert given_length["reward"].tolist() == [1, 3, 3]
    version = np.array([-1, 0, -1, 0, 0, -1, 0, 0, 0])
    untrained = batch(version=version, loss_mask=(version >= 0) & (np.arange(9) < 6))  # a turn at another temperature
    assert penalise_overlong(untrained, section, max_tokens=6)[0]["reward"].tolist() == [1, 1.5, 1.5]


def test_rewards_are_clipped_before_the_penalty_for_the_distance() -> None:
    given = batch(greedy_reward=np.full(3, -7, np.float32), reference_logprobs=np.full(9, -2, np.float32))
    found, metrics = clip_rewards(given.with_columns(**{"reward:correct": given["reward"]}), (-1.5, 2.5))
    assert found["reward"].tolist() == [1, 2.5, 2.5]
    assert found["greedy_reward"].tolist() == [-1.5] * 3
    assert found["reward:correct"].tolist() == [1, 3, 3]
    assert metrics["clip_reward/share"].number() == 1 / 2, "of the two episodes"
    # a nat for each trained token: 1, and 2 + 3 of the second episode
    assert penalise_kl(found, KlRewardSection(weight=1.0))[0]["reward"].tolist() == [0, -2.5, -2.5]
    assert clip_rewards(given, None) == (given, {})


def test_a_cut_episode_loses_a_factor_of_its_reward_before_the_penalty_for_its_length() -> None:
    found, metrics = penalise_overlong(batch(), OverlongSection(factor=0.25), max_tokens=6)
    # one of the two sequences of the second episode is cut, and both have the reward of the episode
    assert found["reward"].tolist() == [1, 0.75, 0.75]
    assert found["reward:overlong"].tolist() == [0, -2.25, -2.25]
    assert found.info["penalties"] == ("overlong",)
    assert metrics["reward/overlong"].number() == pytest.approx(-1.5)
    both, _ = penalise_overlong(batch(), OverlongSection(factor=0.25, penalty=2.0, buffer=4), max_tokens=6)
    assert both["reward"].tolist() == [1, 0.75 - 1.5, 0.75 - 1.5]
    parts = batch(conversation=np.array([0, 1, 1]), episode=np.array([0, 1, 1]))
    whole, _ = penalise_overlong(parts, OverlongSection(factor=0.25), max_tokens=6)
    assert whole["reward"].tolist() == [1, 3, 3], "the last part of the conversation stopped"


def test_the_divergence_is_charged_at_each_token_and_summed_over_the_episode() -> None:
    reference = tokens(0, -2, 0, -1.5, -1, 0, -1, -3, 20)
    found, metrics = penalise_kl(batch(reference_logprobs=reference), KlRewardSection(weight=0.5))
    # k1 is 1 | .5, 0 | 0, 2, and -21, which the clamps hold at -10
    assert found["token_rewards"].tolist() == [0, -0.5, 0, -0.25, 0, 0, 0, -1, 5]
    assert found["reward"].tolist() == pytest.approx([0.5, 6.75, 6.75])
    assert found["reward:kl"].tolist() == pytest.approx([-0.5, 3.75, 3.75])
    assert metrics["kl_reference/reward"].number() == pytest.approx((1 + 0.5 + 2 - 10) / 6)


def test_without_old_logprobs_the_sampler_is_the_policy() -> None:
    whole = batch(sampler_logprobs=np.zeros(9, np.float32), reference_logprobs=np.zeros(9, np.float32))
    columns = {name: column for name, column in whole.per_token.items() if name != "old_logprobs"}
    found, _ = penalise_kl(evolve(whole, per_token=columns), KlRewardSection(weight=1.0))
    assert not found["token_rewards"].any()


def test_sections_that_ask_for_nothing_change_nothing() -> None:
    given = batch()
    assert mask_overlong(given, OverlongSection())[0] is given
    assert penalise_overlong(given, OverlongSection(), 1)[0] is given
    assert penalise_kl(given, KlRewardSection())[0] is given
    assert correct_gap(given, CorrectionSection())[0] is given


def test_clipping_bounds_both_sides() -> None:
    assert clip_advantages(tokens(-5, 0.5, 5), 2.0).tolist() == [-2, 0.5, 2]
    assert clip_advantages(tokens(-5, 0.5, 5), 0.0).tolist() == [-5, 0.5, 5]


def test_clipping_may_bound_them_otherwise() -> None:
    assert clip_advantages(tokens(-5, 0.5, 5), 2.0, 3.0).tolist() == [-3, 0.5, 2]
    assert clip_advantages(tokens(-5, 0.5, 5), 2.0, 0.0).tolist() == [-5, 0.5, 2]
    assert clip_advantages(tokens(-5, 0.5, 5), 0.0, 1.0).tolist() == [-1, 0.5, 5]


LN = math.log
OLD = tokens(0, -1 + LN(4), 0, -1, -1 + LN(0.1), 0, -1, -1 + LN(2), -1)
"""Trainer over sampler: 4 | 1, 0.1 | 1, 2, 1."""


def test_weights_of_tokens_multiply_advantages() -> None:
    found, metrics = correct_gap(batch(old_logprobs=OLD), CorrectionSection(weights="token", cap=3.0))
    assert found["advantages"].tolist() == pytest.approx([1, 3, -2, -2, -0.2, 4, 4, 8, 4])
    assert metrics["correction/weight/max"].number() == pytest.approx(3)
    assert metrics["correction/weight/mean"].number() == pytest.approx((3 + 1 + 0.1 + 1 + 2 + 1) / 6)
    assert found["loss_mask"].tolist() == batch()["loss_mask"].tolist()


def test_weights_of_sequences_leave_one_advantage_for_each() -> None:
    found, _ = correct_gap(batch(old_logprobs=OLD), CorrectionSection(weights="sequence", cap=3.0))
    assert found["advantages"].tolist() == pytest.approx([3, -0.2, 8])


def test_icepop_takes_tokens_out_and_still_counts_them() -> None:
    section = CorrectionSection(weights="token", cap=9.0, mask="token", low=0.5, high=3.0)
    found, metrics = correct_gap(batch(old_logprobs=OLD), section)
    assert found["advantages"].tolist() == pytest.approx([1, 0, -2, -2, 0, 4, 4, 8, 4])
    assert found["loss_mask"].all() == batch()["loss_mask"].all()
    assert metrics["correction/masked"].number() == pytest.approx(2 / 6)


def test_what_is_masked_need_not_count() -> None:
    section = CorrectionSection(mask="token", low=0.5, high=3.0, count_masked=False)
    found, _ = correct_gap(batch(old_logprobs=OLD), section)
    assert found["advantages"].tolist() == [1, -2, 4]
    assert found["loss_mask"].tolist() == [0, 0, 0, 1, 0, 0, 1, 1, 1]
    assert not section.per_token


def test_sequences_are_masked_by_their_geometric_mean() -> None:
    found, _ = correct_gap(batch(old_logprobs=OLD), CorrectionSection(mask="sequence", low=0.5, high=2.0))
    assert found["advantages"].tolist() == [0, 0, 4]


@pytest.mark.parametrize("guard", [{"max_token_gap": 2.0}, {"max_mean_gap": 1.0}])
def test_the_guard_drops_whole_sequences(guard: dict[str, float]) -> None:
    found, metrics = correct_gap(batch(old_logprobs=OLD), CorrectionSection(**guard))  # type: ignore[arg-type]
    # |gaps| in nats: 1.39 | 0, 2.30, mean 1.15 | 0, .69, 0
    kept = [0, 1] if "max_token_gap" in guard else [0, 0]
    assert found["loss_mask"].tolist() == [*kept, 0, 0, 0, 0, 1, 1, 1]
    assert metrics["correction/dropped"].number() == pytest.approx(1 / 3 if kept[1] else 2 / 3)


@pytest.mark.parametrize("section", [
    CorrectionSection(weights="token"),
    CorrectionSection(weights="sequence", mask="sequence"),
    CorrectionSection(mask="token", count_masked=False, max_token_gap=1.0, max_mean_gap=0.1),
    CorrectionSection(weights="token", normalise=True, mask="worst", measure="k3", high=0.4),
    CorrectionSection(weights="sequence", normalise=True, mask="product", measure="k2", max_mean_error=3.0),
])  # fmt: skip
def test_correcting_does_not_depend_on_order_and_stays_finite(section: CorrectionSection) -> None:
    given = random_batch(3, columns=["advantages", "old_logprobs", "sampler_logprobs"])
    given = given.with_columns(old_logprobs=np.where(given["tokens"] % 7 == 0, -np.inf, given["old_logprobs"]))
    order = np.random.default_rng(0).permutation(given.sequences)
    found, _ = correct_gap(given, section)
    shuffled, metrics = correct_gap(given.take(order), section)
    assert np.isfinite(found["advantages"]).all()
    assert all(np.isfinite(metric.number()) for metric in metrics.values())
    for name in ("advantages", "loss_mask"):
        np.testing.assert_allclose(found.take(order)[name].astype(float), shuffled[name].astype(float))


def test_what_must_know_the_whole_batch_happens_before_the_training_pass() -> None:
    alone, together = CorrectionSection(weights="token"), CorrectionSection(weights="token", normalise=True)
    dropping = CorrectionSection(max_mean_error=2.0)
    assert place_correction(alone, False, KlRewardSection()) == (CorrectionSection(), alone)
    kept, cut = (TopEntropySection(share=0.5, count_rest=rest) for rest in (True, False))
    assert place_correction(alone, False, KlRewardSection(), kept) == (CorrectionSection(), alone)
    assert place_correction(alone, False, KlRewardSection(), cut) == (alone, CorrectionSection())
    for section in (together, dropping):
        assert place_correction(section, False, KlRewardSection()) == (section, CorrectionSection())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_empty_mask_normalises_nothing(level: Any) -> None:
    empty = batch(loss_mask=np.zeros(9, bool))
    found, _ = correct_gap(empty, CorrectionSection(weights=level, normalise=True))
    assert np.isfinite(found["advantages"]).all()


def test_an_empty_mask_corrects_nothing() -> None:
    empty = batch(loss_mask=np.zeros(9, bool))
    found, metrics = correct_gap(empty, CorrectionSection(weights="token", mask="sequence", max_mean_gap=0.1))
    assert not found["loss_mask"].any()
    assert all(np.isfinite(metric.number()) for metric in metrics.values())
    assert advantage_metrics(empty) == {}


def test_the_weights_are_those_of_the_formulas() -> None:
    given = random_batch(1, columns=["advantages", "old_logprobs", "sampler_logprobs"])
    found, _ = correct_gap(given, CorrectionSection(weights="token"))
    gaps = gap(given["old_logprobs"], given["sampler_logprobs"], given["loss_mask"])
    expected = np.repeat(given["advantages"], given["lengths"]) * importance_weights(gaps, given["lengths"], "token")
    np.testing.assert_allclose(found["advantages"], expected, rtol=1e-6)


def test_metrics_of_advantages_are_over_trained_tokens() -> None:
    found = advantage_metrics(batch())
    values = np.array([1, -2, -2, 4, 4, 4])
    assert found["advantages/mean"].number() == pytest.approx(values.mean())
    assert found["advantages/std"].number() == pytest.approx(values.std())
    assert (found["advantages/min"].number(), found["advantages/max"].number()) == (-2, 4)
    (row,) = histogram_rows(found)
    seen = {edge: count for edge, count in zip(row["edges"], row["counts"][1:], strict=True) if count}
    assert (row["name"], seen) == ("advantages", {1.0: 1, -2.0: 2, 4.0: 3})


def test_the_reward_without_the_penalty_stays() -> None:
    found, _ = penalise_kl(batch(reference_logprobs=tokens(*[-3.3] * 9)), KlRewardSection(weight=0.1))
    assert found["task_reward"].tolist() == [1, 3, 3]


@pytest.mark.parametrize(
    ("per", "conversation", "masked", "divergence"),
    [
        ("sequence", [0, 1, 2], [], (1 + 2.5) / 2),  # of an episode of one token, and of one of 2 + 3
        ("sequence", [0, 1, 2], [1], 2.5),
        ("token", [0, 1, 2], [], (1 + 0.25 + 2 / 3) / 3),  # of sequences of 1, 2 and 3 tokens
        ("token", [0, 1, 1], [], (1 + 2.5 / 5) / 2),  # the last two are parts of one conversation
        ("token", [0, 1, 1], [1], 2.5 / 5),
    ],
)
def test_an_adaptive_weight_is_charged_and_then_adapted(
    per: Any, conversation: list[int], masked: list[int], divergence: float
) -> None:
    reference = tokens(0, -2, 0, -1.5, -1, 0, -1, -3, -1)
    control = KlControlSection(target=divergence / 1.1, horizon=20.0, per=per)
    section, carried = KlRewardSection(weight=0.5, adaptive=control), {}
    for weight in (0.5, 0.5 * (1 + 0.1 * 2 / 20), 0.5 * (1 + 0.1 * 2 / 20) ** 2):
        given = batch(reference_logprobs=reference, conversation=np.array(conversation), share=np.ones(3, np.float32))
        given = with_mask(given, given["loss_mask"] & ~np.isin(np.arange(9), masked))
        found, metrics = penalise_kl(given, section, carried)
        assert found["token_rewards"].min() == pytest.approx(-2 * weight, rel=1e-6)
        assert metrics["kl_reward/weight"].number() == pytest.approx(weight, rel=1e-6)
    assert json.loads(json.dumps(carried)) == carried
    adapted = dict(carried)
    penalise_kl(batch(reference_logprobs=reference, loss_mask=np.zeros(9, bool)), section, carried)
    assert carried == adapted, "a step without a trained token measures nothing"
    assert "kl_reward/weight" not in penalise_kl(batch(), KlRewardSection(weight=1.0), {})[1]


class Uncertain(FakeBackend):
    """A backend whose tokens have these entropies."""

    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Any = "policy") -> dict[str, Any]:
        assert outputs == ("entropy",)
        return {"entropy": np.where(batch["loss_mask"], tokens(9, 3, 9, 1, 5, 9, 2, 4, 6), np.float32(0))}


def test_tokens_of_high_entropy_keep_their_advantage() -> None:
    found, metrics = keep_uncertain(batch(), Uncertain(), TopEntropySection(share=0.5))
    # of 1 to 6 the upper half is what is at least 3.5
    assert found["advantages"].tolist() == [0, 0, 0, 0, -2, 0, 0, 4, 4]
    assert found["loss_mask"].sum() == 6
    assert metrics["top_entropy/threshold"].number() == 3.5
    assert metrics["top_entropy/share"].number() == 0.5
    found, _ = keep_uncertain(batch(), Uncertain(), TopEntropySection(share=0.5, count_rest=False))
    assert np.flatnonzero(found["loss_mask"]).tolist() == [4, 7, 8]
    assert found["advantages"].tolist() == [1, -2, 4]


def test_where_all_tokens_teach_nothing_is_scored() -> None:
    given = batch()
    assert keep_uncertain(given, None, TopEntropySection())[0] is given  # type: ignore[arg-type]
    nothing = given.with_columns(loss_mask=np.zeros(9, bool))
    assert keep_uncertain(nothing, Uncertain(), TopEntropySection(share=0.5))[0] is nothing


def covariances(given: Batch) -> Any:
    """Return the covariance of each token, by loops in float64; -inf where nothing is trained."""
    advantages = np.repeat(np.asarray(given["advantages"], np.float64), given["lengths"])
    places, logprobs = np.flatnonzero(given["loss_mask"]), given["old_logprobs"].astype(np.float64)
    means = [math.fsum(column[places]) / len(places) for column in (advantages, logprobs)]
    found = np.full(given.tokens, -math.inf)
    for place in places:
        found[place] = (advantages[place] - means[0]) * (logprobs[place] - means[1])
    return found


@pytest.mark.parametrize("seed", range(5))
def test_kl_cov_weighs_the_tokens_of_the_largest_covariance(seed: int) -> None:
    given = random_batch(seed, columns=["advantages", "old_logprobs"], sequences=24)
    found, metrics = treat_covariance(given, CovarianceSection(method="kl-cov", share=0.1, weight=0.7), seed)
    each = covariances(given)
    number = int(0.1 * given["loss_mask"].sum())
    expected = np.zeros(given.tokens)
    expected[np.argsort(-each)[:number]] = 0.7
    np.testing.assert_allclose(found["old_kl_weight"], expected, rtol=1e-6)
    np.testing.assert_array_equal(found["advantages"], given["advantages"])
    trained = each[given["loss_mask"]]
    assert metrics["covariance/mean"].number() == pytest.approx(trained.mean())
    assert metrics["covariance/share"].number() == pytest.approx(number / len(trained))


@pytest.mark.parametrize("seed", range(5))
def test_clip_cov_draws_tokens_between_its_bounds(seed: int) -> None:
    given = random_batch(seed, columns=["advantages", "old_logprobs"], sequences=24)
    each, own = covariances(given), np.repeat(given["advantages"], given["lengths"])
    within = (each > 0.2) & (each < 2.0)
    section = CovarianceSection(method="clip-cov", share=0.05, low=0.2, high=2.0)
    found, metrics = treat_covariance(given, section, seed)
    chosen = found["advantages"] != own
    assert within[chosen].all()
    assert not found["advantages"][chosen].any()
    assert metrics["covariance/share"].number() * given["loss_mask"].sum() == pytest.approx(
        min(int(0.05 * given["loss_mask"].sum()), within.sum())
    )
    everything, _ = treat_covariance(given, evolve(section, share=1.0), seed)
    np.testing.assert_array_equal(everything["advantages"], np.where(within, 0, own))


def test_the_tokens_of_clip_cov_are_drawn_evenly_and_again_by_the_same_seed() -> None:
    given = random_batch(3, columns=["advantages", "old_logprobs"], sequences=24)
    section = CovarianceSection(method="clip-cov", share=0.03, low=0.0, high=9.0)
    own = np.repeat(given["advantages"], given["lengths"])
    times = sum((treat_covariance(given, section, seed)[0]["advantages"] != own).astype(int) for seed in range(2000))
    candidates = covariances(given) > 0
    candidates &= own != 0  # an advantage of 0 that becomes 0 is not seen
    number = int(0.03 * given["loss_mask"].sum())
    rate = 2000 * number / (covariances(given) > 0).sum()
    assert np.abs(times[candidates] - rate).max() < 5 * math.sqrt(rate)
    once, twice = (treat_covariance(given, section, 7)[0]["advantages"] for _ in range(2))
    np.testing.assert_array_equal(once, twice)


@pytest.mark.parametrize("method", ["clip-cov", "kl-cov"])
def test_the_treated_tokens_do_not_depend_on_the_order_of_sequences(method: Any) -> None:
    given = random_batch(4, columns=["advantages", "old_logprobs"], sequences=24)
    section = CovarianceSection(method=method, share=0.1, low=0.05, high=5.0)
    order = np.random.default_rng(0).permutation(24)
    column = {"clip-cov": "advantages", "kl-cov": "old_kl_weight"}[method]
    expected, _ = treat_covariance(given, section, 11)
    found, _ = treat_covariance(given.take(order), section, 11)
    np.testing.assert_array_equal(found.take(np.argsort(order))[column], expected[column])


@pytest.mark.parametrize("method", ["clip-cov", "kl-cov"])
def test_no_more_tokens_than_the_share_are_treated_where_covariances_are_equal(method: Any) -> None:
    given = random_batch(6, columns=["advantages", "old_logprobs"], sequences=24)
    certain = np.random.default_rng(0).random(given.tokens) < 0.7
    given = given.with_columns(
        old_logprobs=np.where(certain, 0, given["old_logprobs"]).astype(np.float32),
        advantages=np.where(np.arange(24) % 2, 1, -1).astype(np.float32),
    )
    section = CovarianceSection(method=method, share=0.05, low=0.01, high=9.0)
    order = np.random.default_rng(1).permutation(24)
    metrics = [treat_covariance(one, section, 3)[1] for one in (given, given.take(order))]
    number = int(0.05 * given["loss_mask"].sum())
    for found in metrics:
        assert found["covariance/share"].number() == pytest.approx(number / given["loss_mask"].sum())
    column = {"clip-cov": "advantages", "kl-cov": "old_kl_weight"}[method]
    expected, found = (treat_covariance(one, section, 3)[0] for one in (given, given.take(order)))
    np.testing.assert_array_equal(found.take(np.argsort(order))[column], expected[column])


def test_covariances_turn_with_the_sign_of_advantages_however_large() -> None:
    given = random_batch(5, columns=["advantages", "old_logprobs"], sequences=24)
    large = given.with_columns(advantages=(given["advantages"] * 1e5).astype(np.float32))
    turned = large.with_columns(advantages=-large["advantages"])
    section = CovarianceSection(method="kl-cov", share=0.1)
    found, other = (treat_covariance(one, section, 0)[1]["covariance/mean"].number() for one in (large, turned))
    assert found == pytest.approx(-other, rel=1e-6)


def test_where_all_covariances_are_0_no_token_is_treated() -> None:
    for given in (batch(advantages=tokens(2, 2, 2)), batch(loss_mask=np.zeros(9, bool))):
        found, _ = treat_covariance(given, CovarianceSection(method="kl-cov"), 0)
        assert "old_kl_weight" not in found or not found["old_kl_weight"].any()
        assert treat_covariance(given, CovarianceSection(), 0)[0] is given


def test_a_token_that_cannot_occur_leaves_covariances_finite() -> None:
    given = batch(old_logprobs=tokens(0, -1, 0, -math.inf, -1, 0, -2, -1, -3))
    _, metrics = treat_covariance(given, CovarianceSection(method="kl-cov"), 0)
    assert math.isfinite(metrics["covariance/mean"].number())
