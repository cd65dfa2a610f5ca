from typing import Any

import numpy as np

from whet.data.batch import from_sequences
from whet.testing.contracts.advantages import AdvantagesContract
from whet.testing.contracts.component import ComponentContract
from whet.testing.contracts.filter import FilterContract
from whet.testing.contracts.loss import LossContract
from whet_grpo.advantages import GroupMean
from whet_grpo.config import ClippedPgConfig, GroupMeanConfig, UnequalRewardsConfig
from whet_grpo.filters import UnequalRewards
from whet_grpo.losses import ClippedPg


class TestPlugin(ComponentContract):
    hooks = "whet_grpo.hooks"


class TestOnPolicy(LossContract):
    def make(self) -> ClippedPg:
        return ClippedPg(ClippedPgConfig())


class TestOffPolicy(LossContract):
    def make(self) -> ClippedPg:
        loss = ClippedPg(ClippedPgConfig())
        loss.columns = (*loss.columns, "old_logprobs")
        return loss


class TestPerSequence(LossContract):
    def make(self) -> ClippedPg:
        loss = ClippedPg(ClippedPgConfig(aggregation="sequence", clip_high=0.28))
        loss.columns = (*loss.columns, "old_logprobs")
        return loss


class TestWithEntropy(LossContract):
    def make(self) -> ClippedPg:
        return ClippedPg(ClippedPgConfig(entropy=True))


class TestUnequalRewards(FilterContract):
    def make(self) -> UnequalRewards:
        return UnequalRewards(UnequalRewardsConfig())


class TestGroupMean(AdvantagesContract):
    def make(self) -> GroupMean:
        return GroupMean(GroupMeanConfig())

    def call(self, rewards: Any, group: Any) -> Any:
        sequences = [{"tokens": [1, 2], "loss_mask": [False, True]}] * len(rewards)
        batch = from_sequences(sequences, prompt_lengths=[1] * len(rewards), group=group)
        return self.make()(batch.with_columns(reward=rewards))


class TestGroupMeanOfTheOthers(TestGroupMean):
    def make(self) -> GroupMean:
        return GroupMean(GroupMeanConfig(scale="batch", leave_one_out=True))


def test_sequences_of_one_episode_count_once_and_share_its_advantage() -> None:
    sequences = [{"tokens": [1, 2], "loss_mask": [False, True]}] * 4
    batch = from_sequences(sequences, prompt_lengths=[1] * 4, group=[0] * 4, episode=[5, 5, 5, 9])
    batch = batch.with_columns(reward=np.array([1, 1, 1, 0], np.float32))
    advantages = GroupMean(GroupMeanConfig(scale="none"))(batch)
    assert advantages.tolist() == [0.5, 0.5, 0.5, -0.5]
