import pytest
from attrs import evolve

from whet.errors import DataError
from whet_grpo.config import UnequalRewardsConfig
from whet_grpo.filters import UnequalRewards
from whet_testing.contracts.filter import group_of


def test_groups_of_equal_rewards_are_left_out() -> None:
    keep = UnequalRewards(UnequalRewardsConfig())
    assert keep(group_of([0.0, 1.0]))
    assert not keep(group_of([0.1, 0.1, 0.1]))


def test_one_reward_can_be_what_counts() -> None:
    assert not UnequalRewards(UnequalRewardsConfig(reward="correct"))(group_of([1.0, 1.0]))
    assert UnequalRewards(UnequalRewardsConfig(reward="correct"))(group_of([1.0, 0.0]))
    with pytest.raises(DataError, match="no reward 'style' to compare; there is correct"):
        UnequalRewards(UnequalRewardsConfig(reward="style"))(group_of([1.0, 0.0]))


def test_a_response_that_nobody_can_decide_about_is_worth_0_by_every_reward() -> None:
    keep, group = UnequalRewards(UnequalRewardsConfig(reward="correct")), group_of([1.0, 1.0])
    undecided = evolve(group.episodes[0], rewards={}, undecided=("it needs too much",))
    assert keep(evolve(group, episodes=(undecided, group.episodes[1])))
    assert not keep(evolve(group, episodes=(undecided, undecided)))
