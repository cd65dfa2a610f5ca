from whet.testing.contracts.advantages import AdvantagesContract
from whet.testing.contracts.algorithm import AlgorithmContract
from whet.testing.contracts.component import ComponentContract
from whet.testing.contracts.filter import FilterContract
from whet.testing.contracts.loss import LossContract
from whet_grpo.advantages import GroupMean
from whet_grpo.config import ClippedPgConfig, GroupMeanConfig, UnequalRewardsConfig
from whet_grpo.filters import UnequalRewards
from whet_grpo.losses import ClippedPg


class TestPlugin(ComponentContract):
    hooks = "whet_grpo.hooks"


class TestGrpo(AlgorithmContract):
    use = "grpo"
    document = {"prompts_per_step": 4, "group_size": 4}


class TestGrpoWithMinibatches(TestGrpo):
    document = {"prompts_per_step": 4, "group_size": 4, "minibatches": 2}


class TestClippedPg(LossContract):
    def make(self) -> ClippedPg:
        return ClippedPg(ClippedPgConfig())


class TestClippedPgAgainstOldLogprobs(TestClippedPg):
    optional_columns = ("old_logprobs",)


class TestClippedPgBySequence(TestClippedPgAgainstOldLogprobs):
    def make(self) -> ClippedPg:
        return ClippedPg(ClippedPgConfig(aggregation="sequence", entropy=True))


class TestGroupMean(AdvantagesContract):
    def make(self) -> GroupMean:
        return GroupMean(GroupMeanConfig())


class TestGroupMeanOfTheBatch(AdvantagesContract):
    def make(self) -> GroupMean:
        return GroupMean(GroupMeanConfig(scale="batch", epsilon=0.0))


class TestLeaveOneOut(AdvantagesContract):
    def make(self) -> GroupMean:
        return GroupMean(GroupMeanConfig(scale="none", leave_one_out=True))


class TestUnequalRewards(FilterContract):
    def make(self) -> UnequalRewards:
        return UnequalRewards(UnequalRewardsConfig())
