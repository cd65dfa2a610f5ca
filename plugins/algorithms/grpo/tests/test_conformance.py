"""The contracts of core, held by every loss, estimator and filter in the ways in which they can be set."""

from typing import Any

import numpy as np
import pytest

from whet.interfaces.loss import Loss
from whet_grpo import losses
from whet_grpo.advantages import (
    Gdpo,
    GroupMean,
    Opo,
    PassAtK,
    ReinforcePlusPlus,
    Remax,
    Rloo,
    RoleBaseline,
    TurnReturns,
)
from whet_grpo.config import (
    CispoConfig,
    ClippedPgConfig,
    DppoConfig,
    GdpoConfig,
    GmpoConfig,
    GroupMeanConfig,
    GspoConfig,
    OffPolicySection,
    OpoConfig,
    PassAtKConfig,
    ReinforceConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    RlooConfig,
    RoleBaselineConfig,
    SapoConfig,
    TurnReturnsConfig,
    UnequalRewardsConfig,
    VespoConfig,
)
from whet_grpo.filters import UnequalRewards
from whet_ops.algorithms.config import KlLossSection, KlOldSection, LikelihoodSection
from whet_testing.batches import token_advantages
from whet_testing.contracts.advantages import AdvantagesContract
from whet_testing.contracts.algorithm import AlgorithmContract
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.filter import FilterContract
from whet_testing.contracts.loss import LossContract

ALL_OF_THEM = {"kl_reward": {"weight": 0.1}, "overlong": {"mask": True, "penalty": 1.0, "buffer": 2, "length": 8}}
CORRECTION = {"weights": "token", "mask": "sequence", "max_token_gap": 3.0}


class TestPlugin(ComponentContract):
    hooks = "whet_grpo.hooks"


class TestGrpo(AlgorithmContract):
    use = "grpo"
    document = {"prompts_per_step": 4, "group_size": 4}


class TestGrpoWithMinibatches(TestGrpo):
    document = {"prompts_per_step": 4, "group_size": 4, "minibatches": 2, "epochs": 2, "count_over": "batch"}


class TestGrpoWithEverything(TestGrpo):
    document = {
        "prompts_per_step": 4, "group_size": 4, "correction": CORRECTION, "clip_advantages": 1.0,
        "clip_advantages_below": 0.5, "clip_reward": [-0.5, 0.5], **ALL_OF_THEM,
        "loss": {"use": "clipped-pg", "kl": {"weight": 0.1}},
    }  # fmt: skip


class TestGrpoWithTheRest(TestGrpo):
    document = {
        "prompts_per_step": 4, "group_size": 4, "minibatches": 2, "top_entropy": {"share": 0.5},
        "kl_reward": {"weight": 0.1, "adaptive": {"target": 0.5, "horizon": 40.0}}, "advantages": "remax",
        "loss": {"use": "sapo", "likelihood": {"weight": 0.1}, "off_policy": {"threshold": 0.1}},
    }  # fmt: skip


class TestGrpoWithClipCov(TestGrpo):
    document = {
        "prompts_per_step": 4, "group_size": 4, "covariance": {"method": "clip-cov", "share": 0.1, "low": 0.0},
        "correction": CORRECTION, "loss": "dppo", "overlong": {"factor": 0.5},
    }  # fmt: skip


class TestGrpoWithKlCov(TestGrpo):
    document = {
        "prompts_per_step": 4, "group_size": 4, "minibatches": 2, "covariance": {"method": "kl-cov", "share": 0.1},
        "loss": "vespo",
    }  # fmt: skip


class TestGrpoWithOpo(TestGrpo):
    document = {"prompts_per_step": 4, "group_size": 4, "advantages": "opo", "loss": "gmpo"}


class TestReinforcePlusPlusAlone(TestGrpo):
    document = {
        "prompts_per_step": 8, "group_size": 1, "advantages": "reinforce-plus-plus", "kl_reward": {"weight": 0.1},
        "loss": "reinforce",
    }  # fmt: skip


MAKERS = {
    "clipped-pg": lambda **shared: losses.ClippedPg(ClippedPgConfig(clip_high=0.28, clip_dual=3.0, **shared)),
    "gspo": lambda **shared: losses.Gspo(GspoConfig(clip_low=0.3, clip_high=0.4, **shared)),
    "gspo-token": lambda **shared: losses.Gspo(GspoConfig(clip_low=0.3, clip_high=0.4, level="token", **shared)),
    "whole sequences": lambda **shared: losses.Gspo(GspoConfig(clip_low=0.9, clip_high=9.0, ratio="product", **shared)),
    "cispo": lambda **shared: losses.Cispo(CispoConfig(clip_low=0.8, clip_high=0.3, **shared)),
    "gmpo": lambda **shared: losses.Gmpo(GmpoConfig(**shared)),
    "sapo": lambda **shared: losses.Sapo(SapoConfig(**shared)),
    "vespo": lambda **shared: losses.Vespo(VespoConfig(**shared)),
    "dppo": lambda **shared: losses.Dppo(DppoConfig(bound_low=0.1, max_weight=2.0, **shared)),
    "dppo by kl": lambda **shared: losses.Dppo(DppoConfig(divergence="kl", bound_high=0.05, **shared)),
    "reinforce": lambda **shared: losses.Reinforce(ReinforceConfig(**shared)),
}


def old_kl_weight(batch: Any, rng: Any) -> Any:
    """Return a weight for some trained tokens [N], also where the advantage is 0."""
    return np.where(batch["loss_mask"] & (rng.random(batch.tokens) < 0.3), 0.7, 0).astype(np.float32)


@pytest.mark.parametrize("name", list(MAKERS))
class EveryLoss(LossContract):
    """The contract for each loss in turn."""

    shared: dict[str, Any] = {}

    @pytest.fixture(autouse=True)
    def chosen(self, name: str) -> None:
        self.name = name

    def make(self) -> Loss:
        return MAKERS[self.name](**self.shared)


class TestLosses(EveryLoss):
    pass


class TestLossesAgainstOldLogprobs(EveryLoss):
    optional_columns = ("old_logprobs",)


class TestLossesOfTokens(EveryLoss):
    optional_columns = ("old_logprobs",)
    makers = {"advantages": token_advantages}
    shared = {"aggregation": "constant", "max_length": 20, "entropy": True}


class TestLossesThatKeepSomeTokensNearTheOldPolicy(EveryLoss):
    optional_columns = ("old_logprobs", "old_kl_weight")
    makers = {"old_kl_weight": old_kl_weight}


class TestLossesThatCountEmptySequences(EveryLoss):
    shared = {"aggregation": "sequence", "count_empty": True, "metrics": "all"}


class TestLossesWithAClampedPenalty(EveryLoss):
    shared = {
        "kl": KlLossSection(weight=0.1, estimator="abs", importance="score", clamp=1.0),
        "kl_old": KlOldSection(weight=0.1, estimator="k3", to="old"),
    }  # fmt: skip


class TestLossesWithAPenalty(EveryLoss):
    optional_columns = ("old_logprobs",)
    shared = {"aggregation": "sequence", "kl": KlLossSection(weight=0.1, importance="ratio")}


class TestLossesWithAPenaltyOfSequences(EveryLoss):
    optional_columns = ("old_logprobs",)
    shared = {"aggregation": "sequence", "kl": KlLossSection(weight=0.1, importance="sequence")}


class TestLossesWithAPenaltyByTheSampler(EveryLoss):
    optional_columns = ("old_logprobs", "task_reward")
    shared = {
        "kl": KlLossSection(weight=0.1, importance="sampler"),
        "likelihood": LikelihoodSection(weight=0.3, at_least=0.2),
    }


class TestLossesWithALikelihood(EveryLoss):
    shared = {"likelihood": LikelihoodSection(weight=0.3, at_least=0.2), "aggregation": "sequence"}


class TestLossesThatMaskOffPolicySequences(EveryLoss):
    optional_columns = ("old_logprobs",)
    shared = {"off_policy": OffPolicySection(threshold=0.1)}


class TestLossesWithoutABoundOfTheRatio(EveryLoss):
    optional_columns = ("old_logprobs",)
    shared = {"clamp_log_ratio": 0.0, "kl": KlLossSection(weight=0.1, importance="ratio")}


class TestLossesThatTellEmptyFromMasked(EveryLoss):
    optional_columns = ("version",)
    shared = {"aggregation": "sequence", "count_empty": True, "count_masked": False}


class TestLossesWithAStraightPenalty(EveryLoss):
    shared = {"aggregation": "token", "kl": KlLossSection(weight=0.1, straight_through=True)}


class TestGroupMean(AdvantagesContract):
    def make(self) -> GroupMean:
        return GroupMean(GroupMeanConfig())


class TestGroupMeanOfTheBatch(AdvantagesContract):
    def make(self) -> GroupMean:
        return GroupMean(GroupMeanConfig(scale="batch", epsilon=0.0))


class TestGroupMeanOfTheOthers(AdvantagesContract):
    def make(self) -> GroupMean:
        config = GroupMeanConfig(leave_one_out=True, std_over="others", unbiased=False, epsilon=1e-6)
        return GroupMean(config)


class TestRloo(AdvantagesContract):
    def make(self) -> Rloo:
        return Rloo(RlooConfig())


class TestWhitenedRloo(AdvantagesContract):
    def make(self) -> Rloo:
        return Rloo(RlooConfig(whiten=True, epsilon=0.0))


class TestOpo(AdvantagesContract):
    def make(self) -> Opo:
        return Opo(OpoConfig())


class TestPassAtK(AdvantagesContract):
    def make(self) -> PassAtK:
        return PassAtK(PassAtKConfig(k=2))  # with more, several best samples of a group have no advantage


class TestRemax(AdvantagesContract):
    def make(self) -> Any:
        estimate = Remax(RemaxConfig())
        return lambda batch: estimate(batch.with_columns(greedy_reward=np.full(batch.sequences, 0.25, np.float32)))


class TestTurnReturns(AdvantagesContract):
    def make(self) -> TurnReturns:
        return TurnReturns(TurnReturnsConfig(gamma=0.9))


class TestScaledTurnReturns(AdvantagesContract):
    def make(self) -> TurnReturns:
        return TurnReturns(TurnReturnsConfig(baseline="group-mean", scale="group", singleton="reward"))


class TestRoleBaseline(AdvantagesContract):
    moving = True

    def make(self) -> RoleBaseline:
        return RoleBaseline(RoleBaselineConfig(gamma=0.9))


class TestReinforcePlusPlus(AdvantagesContract):
    def make(self) -> ReinforcePlusPlus:
        return ReinforcePlusPlus(ReinforcePlusPlusConfig())


class TestReinforcePlusPlusWithBaseline(AdvantagesContract):
    def make(self) -> ReinforcePlusPlus:
        return ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline=True, per_token=False, over="sequences"))


class TestDiscountedReinforcePlusPlus(AdvantagesContract):
    def make(self) -> ReinforcePlusPlus:
        config = ReinforcePlusPlusConfig(gamma=0.9, kl_of="own", epsilon_at="variance", unbiased=True)
        return ReinforcePlusPlus(config)


class TestGdpoOverTokens(AdvantagesContract):
    def make(self) -> Gdpo:
        return Gdpo(GdpoConfig(over="tokens", batch_epsilon=1e-8, epsilon_at="variance", leave_one_out=True))


class TestGdpo(AdvantagesContract):
    def make(self) -> Gdpo:
        return Gdpo(GdpoConfig())


class TestUnequalRewards(FilterContract):
    def make(self) -> UnequalRewards:
        return UnequalRewards(UnequalRewardsConfig())


class TestUnequalNamedRewards(FilterContract):
    def make(self) -> UnequalRewards:
        return UnequalRewards(UnequalRewardsConfig(reward="correct"))
