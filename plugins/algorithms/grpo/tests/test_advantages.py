from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.data.batch import Batch, from_sequences
from whet.errors import DataError
from whet_grpo.advantages import Gdpo, GroupMean, ReinforcePlusPlus, Rloo
from whet_grpo.config import GdpoConfig, GroupMeanConfig, ReinforcePlusPlusConfig, RlooConfig
from whet_ops.algorithms.policy_steps import add_reward


def batch(rewards: list[float], group: list[int], sizes: list[int] | None = None, **columns: object) -> Batch:
    """Return responses with so many trained tokens after a prompt of one; by default of one each."""
    sizes = sizes or [1] * len(rewards)
    rows = [{"tokens": range(n + 1), "loss_mask": np.arange(n + 1) > 0} for n in sizes]
    made = from_sequences(rows, prompt_lengths=[1] * len(rows), group=group)
    return made.with_columns(reward=np.array(rewards, np.float32), **columns)


def test_sequences_of_one_episode_count_once_and_share_its_advantage() -> None:
    sequences = [{"tokens": [1, 2], "loss_mask": [False, True]}] * 4
    made = from_sequences(sequences, prompt_lengths=[1] * 4, group=[0] * 4, episode=[5, 5, 5, 9])
    made = made.with_columns(reward=np.array([1, 1, 1, 0], np.float32))
    assert GroupMean(GroupMeanConfig(scale="none"))(made).tolist() == [0.5, 0.5, 0.5, -0.5]


def test_a_penalty_for_the_distance_does_not_make_the_rewards_of_a_group_unequal() -> None:
    task, costs = np.array([1, 1, 1, 0], np.float32), np.array([0.1, 0.3, 0.2, 0.2], np.float32)
    charged = batch((task - costs).tolist(), [0, 0, 1, 1], task_reward=task)
    found = GroupMean(GroupMeanConfig(scale="none", rescale="unequal"))(charged)
    assert found == pytest.approx(np.array([0.1, -0.1, 0.5, -0.5]) * 4 / 2)


@pytest.mark.parametrize(
    "estimate",
    [
        GroupMean(GroupMeanConfig()),
        Rloo(RlooConfig()),
        Gdpo(GdpoConfig()),
        ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline=True, per_token=False)),
    ],
)
def test_equal_tokens_of_two_tasks_are_two_groups(estimate: object) -> None:
    """All four sequences have the same tokens; only the task that they came from says what is compared."""
    together, apart = batch([1, 0, 3, 2], [0, 0, 0, 0]), batch([1, 0, 3, 2], [0, 0, 1, 1])
    assert len({together.take([i])["tokens"].tobytes() for i in range(4)}) == 1
    one, two = estimate(together), estimate(apart)  # type: ignore[operator]
    assert one[0] < 0 < two[0], "0 is below the mean of all, and above that of its own task"
    np.testing.assert_allclose(two[:2], two[2:], rtol=1e-6)


def test_leave_one_out_compares_with_the_others() -> None:
    found = Rloo(RlooConfig())(batch([1, 2, 6], [0, 0, 0]))
    assert found.tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


def test_whitened_leave_one_out_is_that_of_trl() -> None:
    given = batch([1, 2, 6, 0, 1, 0], [0, 0, 0, 1, 1, 1])
    plain = Rloo(RlooConfig())(given).astype(np.float64)
    found = Rloo(RlooConfig(whiten=True))(given)
    np.testing.assert_allclose(found, (plain - plain.mean()) / (plain.std(ddof=1) + 1e-4), rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus_is_normalised_over_tokens() -> None:
    found = ReinforcePlusPlus(ReinforcePlusPlusConfig())(batch([1, 0], [0, 1], [3, 1]))
    # rewards 1, 1, 1 and 0 at the trained tokens: mean 3/4, variance 3/16
    expected = np.array([0.25, -0.75]) / np.sqrt(3 / 16)
    assert found[[1, 2, 3, 5]].tolist() == pytest.approx([*[expected[0]] * 3, expected[1]], rel=1e-5)
    by_sequence = ReinforcePlusPlus(ReinforcePlusPlusConfig(per_token=False, over="sequences"))
    assert by_sequence(batch([1, 0], [0, 1], [3, 1])).tolist() == pytest.approx([1, -1])


def test_reinforce_plus_plus_with_baseline_compares_within_the_group_first() -> None:
    estimate = ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline=True, per_token=False))
    found = estimate(batch([1, 0, 9, 7], [0, 0, 1, 1]))
    centred = np.array([0.5, -0.5, 1, -1])
    assert found.tolist() == pytest.approx((centred / centred.std()).tolist(), rel=1e-5)


def test_reinforce_plus_plus_charges_a_token_for_what_follows_alone() -> None:
    costs = np.array([0, -1, -2, 0, 0, 0, -4], np.float32)  # the rewards hold them already
    given = batch([-3 + 5, -4 + 9], [0, 1], [3, 2], token_rewards=costs)
    found = ReinforcePlusPlus(ReinforcePlusPlusConfig())(given)
    to_come = np.array([5 - 3, 5 - 2, 5, 9 - 4, 9 - 4])
    expected = (to_come - to_come.mean()) / to_come.std()
    assert found[given["loss_mask"]].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_gdpo_weighs_the_rewards_that_it_is_told_to() -> None:
    named = {"reward:right": np.array([1, 0, 0, 0], np.float32), "reward:short": np.array([0, 0, 1, 0], np.float32)}
    given = batch([9, 9, 9, 9], [0, 0, 1, 1]).with_columns(**named)
    both = Gdpo(GdpoConfig())(given)
    assert both[0] == pytest.approx(both[2])
    one = Gdpo(GdpoConfig(weights={"right": 1.0}))(given)
    assert one[0] > 0
    assert one[2:].tolist() == [0, 0]
    with pytest.raises(DataError, match=r"weights names the reward 'long', which no .* there are right, short"):
        Gdpo(GdpoConfig(weights={"long": 1.0}))(given)


def test_gdpo_weighs_rewards_as_their_environment_does() -> None:
    generator = np.random.default_rng(0)
    env, weights = np.array([0] * 4 + [1] * 4), {"sums": {"right": 1.0, "long": -1.0, "seen": 0.0}, "games": {}}
    info = {"environments": ("sums", "games"), "reward_weights": weights}

    def estimate(weights: dict[str, float] | None = None, **replaced: Any) -> Any:
        given = batch([0.0] * 8, [0] * 4 + [1] * 4, env=env, **{**columns, **replaced})
        return Gdpo(GdpoConfig(weights=weights or {}))(evolve(given, info=info))

    columns = {f"reward:{name}": generator.normal(size=8) for name in ("right", "long", "seen")}
    found = estimate()
    only_seen = np.where(env == 0, generator.permutation(8), columns["reward:seen"])
    assert estimate(**{"reward:seen": only_seen}).tolist() == found.tolist()
    longer = columns["reward:long"] + np.eye(8)[2]
    assert estimate(**{"reward:long": longer})[2] < found[2]
    played = columns["reward:seen"] + 5 * np.eye(8)[6]
    assert estimate(**{"reward:seen": played})[6] > found[6], "a name without a weight has weight 1"
    assert estimate({"long": 1.0}, **{"reward:long": longer})[2] > estimate({"long": 1.0})[2]


def test_gdpo_does_not_normalise_penalties() -> None:
    generator = np.random.default_rng(1)
    given = batch([0.0] * 8, [0] * 4 + [1] * 4, **{f"reward:{n}": generator.normal(size=8) for n in ("right", "short")})
    kl = generator.uniform(size=8).astype(np.float32)

    def estimate(weight: float, **weights: float) -> Any:
        charged = add_reward(given, "kl", -weight * kl)
        return Gdpo(GdpoConfig(epsilon=0.0, weights=weights))(charged).astype(np.float64)

    without = Gdpo(GdpoConfig(epsilon=0.0))(given)
    np.testing.assert_allclose(estimate(1e-5), without, atol=1e-4)
    centred = [np.array(given[f"reward:{name}"]).reshape(2, 4) for name in ("right", "short")]
    total = sum((r - r.mean(1, keepdims=True)) / r.std(1, ddof=1, keepdims=True) for r in centred)
    total = (total - 0.5 * (kl.reshape(2, 4) - kl.reshape(2, 4).mean(1, keepdims=True))).ravel()
    np.testing.assert_allclose(estimate(0.5), total / total.std(ddof=1), atol=1e-5)
    # Where `weights` names it, it is normalised like a reward.
    named = {"right": 1.0, "short": 1.0, "kl": 0.5}
    np.testing.assert_allclose(estimate(1e-3, **named), estimate(1.0, **named), atol=1e-4)
    np.testing.assert_allclose(estimate(1.0, right=1.0, short=1.0, kl=0.0), without, atol=1e-5)


def test_a_group_of_one_and_an_all_masked_batch_are_finite() -> None:
    alone = batch([1.0], [0])
    masked = batch([1.0, 0.0], [0, 0]).with_columns(loss_mask=np.zeros(4, bool))
    for config in (ReinforcePlusPlusConfig(), ReinforcePlusPlusConfig(per_token=False, over="sequences")):
        for given in (alone, masked):
            assert not ReinforcePlusPlus(config)(given).any()
    assert Rloo(RlooConfig(whiten=True))(alone).tolist() == [0]
    assert Gdpo(GdpoConfig())(alone).tolist() == [0]
