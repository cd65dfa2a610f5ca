"""From rewards and values to returns and advantages, on a batch small enough to work out by hand."""

import numpy as np
import pytest

from whet.data.batch import from_sequences
from whet_ops.algorithms.config import KlRewardSection
from whet_ppo.config import GaeSection
from whet_ppo.targets import estimate, one_place_more, place_rewards, values_of
from whet_testing.fakes import FakeBackend

MASKS = [[0, 1, 1, 0, 1], [0, 1, 1]]  # two turns, and a response that was cut
MASK = np.concatenate(MASKS).astype(bool)
PLAIN = GaeSection(lambda_policy=1.0, whiten="none")


@pytest.fixture
def batch():
    rows = [{"tokens": np.arange(len(mask)) + 10, "loss_mask": np.array(mask, bool)} for mask in MASKS]
    made = from_sequences(rows, prompt_lengths=[1, 1])
    logprobs = np.where(MASK, -1.0, 0).astype(np.float32)
    return made.with_columns(
        sampler_logprobs=logprobs,
        reference_logprobs=np.where(MASK, [0, -1.5, -0.5, 0, -1, 0, -1, -3], 0).astype(np.float32),
        reward=np.array([1.0, 0.5], np.float32),
        stopped=np.array([True, False]),
    )


def test_the_reward_stands_at_the_last_token_that_is_learned(batch):
    placed, metrics = place_rewards(batch, KlRewardSection())
    assert placed["token_rewards"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0.5]
    assert metrics == {}


def test_rewards_of_turns_that_are_not_trained_are_at_trained_tokens(batch):
    given = batch.with_columns(reward=np.array([7.0, 3.0], np.float32))
    spans = np.array([2, 0, 0, 4, 0.5, 1, 0, 0.5], np.float32)  # 2, 4 and 1 are at tokens that are not trained
    placed, _ = place_rewards(given.with_columns(span_rewards=spans), KlRewardSection())
    assert placed["token_rewards"].tolist() == [0, 0, 4, 0, 2 + 0.5 + 0.5, 0, 0, 1 + 0.5 + 1.5]
    first = np.arange(8) < 5
    placed, _ = place_rewards(given.with_columns(span_rewards=spans, loss_mask=MASK & first), KlRewardSection())
    assert placed["token_rewards"].tolist() == [0, 0, 4, 0, 3, 0, 0, 0]
    placed, _ = place_rewards(given.with_columns(span_rewards=spans, loss_mask=MASK & ~first), KlRewardSection())
    assert placed["token_rewards"].tolist() == [0, 0, 0, 0, 0, 0, 0, 3]


def test_the_penalty_stands_at_each_token_and_leaves_the_reward_as_it_was(batch):
    placed, metrics = place_rewards(batch, KlRewardSection(weight=0.1))
    assert placed["token_rewards"] == pytest.approx([0, -0.05, 0.05, 0, 1, 0, 0, 0.5 - 0.2])
    assert placed["reward"].tolist() == [1.0, 0.5]
    assert placed["reward:kl"] == pytest.approx([0.0, -0.2])
    assert metrics["kl_reference/reward"].number() == pytest.approx((0.5 - 0.5 + 0 + 0 + 2) / 5)


def test_the_place_after_a_cut_response_is_scored_and_no_other(batch):
    longer, last = one_place_more(batch, ~batch["stopped"])
    assert longer["tokens"].tolist() == [10, 11, 12, 13, 14, 0, 10, 11, 12, 0]
    assert longer["loss_mask"].tolist() == [False, True, True, False, True, False, False, True, True, True]
    assert (longer["lengths"].tolist(), last.tolist()) == ([6, 4], [5, 9])


def test_to_bootstrap_the_value_after_a_cut_response_is_kept(batch):
    critic = FakeBackend(lambda output, batch: np.arange(batch.tokens, dtype=np.float32))
    values, after = values_of(batch, critic, bootstrap=True)
    assert values.tolist() == [0, 1, 2, 0, 4, 0, 7, 8]
    assert after.tolist() == [0, 9]
    values, after = values_of(batch, critic, bootstrap=False)
    assert values.tolist() == [0, 1, 2, 0, 4, 0, 6, 7]
    assert after is None


@pytest.mark.parametrize(("stopped", "expected"), [([True, False], [9]), ([False, True], [0])])
def test_a_conversation_of_parts_has_the_value_after_its_last_part(batch, stopped, expected):
    critic = FakeBackend(lambda output, batch: np.arange(batch.tokens, dtype=np.float32))
    parts = batch.with_columns(stopped=np.array(stopped), conversation=np.zeros(2, np.int64))
    values, after = values_of(parts, critic, bootstrap=True)
    assert values.tolist() == [0, 1, 2, 0, 4, 0, 7, 8]
    assert after.tolist() == expected


@pytest.mark.parametrize("keys", [{"lambda_policy": 1.0}, {"lambda_policy": 0.5}, {"adaptive_alpha": 0.3}])
def test_parts_of_a_conversation_are_one_chain(keys):
    """As if all tokens were of one sequence: its only difference is where it is cut."""
    row = {"tokens": np.arange(8), "loss_mask": MASK}
    columns = {
        "sampler_logprobs": np.where(MASK, -1.0, 0).astype(np.float32),
        "reference_logprobs": np.where(MASK, [0, -1.5, -0.5, 0, -1, 0, -1, -3], 0).astype(np.float32),
        "span_rewards": np.array([0, 0, 0.5, 0, 0, 0, 0, 0.25], np.float32),
    }
    whole = from_sequences([row], prompt_lengths=[1]).with_columns(**columns, reward=np.ones(1, np.float32))
    rows = [{name: column[cut] for name, column in row.items()} for cut in (slice(5), slice(5, None))]
    cut = from_sequences(rows, prompt_lengths=[1, 1], episode=[0, 0])
    parts = cut.with_columns(
        **columns, reward=np.ones(2, np.float32), conversation=np.zeros(2, np.int64), share=np.full(2, 0.5, np.float32)
    )
    made = []
    for batch in (whole, parts):
        placed, _ = place_rewards(batch, KlRewardSection(weight=0.1))
        values = np.array([0, 0.5, 0.25, 0, 0.75, 0, -0.5, 1], np.float32)
        made.append(estimate(placed, values, np.array([0.25]), GaeSection(**keys))[0])
    for name in ("token_rewards", "returns", "advantages"):
        assert made[1][name].tolist() == made[0][name].tolist()
    assert made[1]["returns"][1] == pytest.approx(1 + 0.25 - 0.1 * (0.5 - 0.5 + 0 + 0 + 2))


def estimated(batch, section, after=None, values=(0, 0.5, 0.5, 0, 0.5, 0, 0.5, 0.5)):
    placed, _ = place_rewards(batch, KlRewardSection())
    return estimate(placed, np.array(values, np.float32), after, section)


def test_returns_and_advantages_of_each_token(batch):
    made, metrics = estimated(batch, PLAIN)
    assert made["returns"].tolist() == [0, 1, 1, 0, 1, 0, 0.5, 0.5]
    assert made["advantages"].tolist() == [0, 0.5, 0.5, 0, 0.5, 0, 0, 0]
    assert made["old_values"].tolist() == [0, 0.5, 0.5, 0, 0.5, 0, 0.5, 0.5]
    assert metrics["returns/mean"].number() == pytest.approx(0.8)
    assert metrics["values/mean"].number() == pytest.approx(0.5)
    assert metrics["advantages/mean"].number() == pytest.approx(0.3)
    assert metrics["critic/explained_variance"].number() == pytest.approx(0, abs=1e-9)


def test_what_the_critic_expects_after_a_cut_response_is_added_to_its_reward(batch):
    made, _ = estimated(batch, PLAIN, after=np.array([0.0, 0.25]))
    assert made["returns"].tolist() == [0, 1, 1, 0, 1, 0, 0.75, 0.75]


def test_lambdas_of_value_and_policy_are_their_own(batch):
    made, _ = estimated(batch, GaeSection(lambda_value=1.0, lambda_policy=0.0, whiten="none"))
    assert made["returns"].tolist() == [0, 1, 1, 0, 1, 0, 0.5, 0.5]
    assert made["advantages"].tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0]
    adaptive, _ = estimated(batch, GaeSection(adaptive_alpha=2.0 / 3, whiten="none"))  # 3 tokens: 1 - 1/2; 2: 1 - 3/4
    assert adaptive["advantages"] == pytest.approx([0, 0.125, 0.25, 0, 0.5, 0, 0, 0])


@pytest.mark.parametrize(("kind", "ddof"), [("unbiased", 1), ("biased", 0)])
def test_whitening_is_over_the_tokens_that_are_learned(batch, kind, ddof):
    made, metrics = estimated(batch, GaeSection(lambda_policy=1.0, whiten=kind))
    raw = np.array([0.5, 0.5, 0.5, 0, 0])
    assert made["advantages"][MASK] == pytest.approx((raw - raw.mean()) / raw.std(ddof=ddof), rel=1e-5)
    assert not made["advantages"][~MASK].any()
    assert metrics["advantages/mean"].number() == pytest.approx(0.3)


def test_equal_advantages_a_single_token_and_none_at_all_are_whitened_to_0(batch):
    flat, _ = estimated(batch, GaeSection(lambda_policy=1.0), values=(0, 0.5, 0.5, 0, 0.5, 0, 0, 0))
    assert flat["advantages"].tolist() == [0.0] * 8
    for kept in (np.arange(8) == 1, np.zeros(8, bool)):
        made, metrics = estimated(batch.with_columns(loss_mask=kept), GaeSection())
        assert made["advantages"].tolist() == [0.0] * 8
        assert all(np.isfinite(metric.number()) for metric in metrics.values())


def masked_whiten(values, shift_mean=True):
    """That of TRL and verl, over trained tokens: the unbiased variance, to which the epsilon is added."""
    whitened = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 0.01)
    return whitened if shift_mean else whitened + values.mean()


def test_the_epsilon_may_be_added_to_the_variance(batch):
    made, _ = estimated(batch, GaeSection(lambda_policy=1.0, whiten_epsilon=0.01, whiten_epsilon_at="variance"))
    assert made["advantages"][MASK] == pytest.approx(masked_whiten(np.array([0.5, 0.5, 0.5, 0, 0])), rel=1e-5)


@pytest.mark.parametrize("of_advantages", ["unbiased", "none"])
def test_rewards_may_be_whitened_around_their_mean(batch, of_advantages):
    section = GaeSection(
        lambda_policy=1.0, whiten=of_advantages, whiten_epsilon=0.01, whiten_epsilon_at="variance", whiten_rewards=True
    )
    made, _ = estimated(batch, section)
    rewards = masked_whiten(np.array([0, 0, 1.0, 0, 0.5]), shift_mean=False)
    returns = np.array([rewards[0] + rewards[1] + rewards[2], rewards[1] + rewards[2], rewards[2],
                        rewards[3] + rewards[4], rewards[4]])  # fmt: skip
    assert made["returns"][MASK] == pytest.approx(returns, rel=1e-5)
    wanted = masked_whiten(returns - 0.5) if of_advantages == "unbiased" else returns - 0.5
    assert made["advantages"][MASK] == pytest.approx(wanted, rel=1e-4)
    equal, _ = estimated(batch.with_columns(reward=np.zeros(2, np.float32)), section)
    assert equal["returns"][MASK].tolist() == [0.0] * 5
