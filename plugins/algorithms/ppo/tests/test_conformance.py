"""The contracts of core, held by the loop and both losses in the ways in which they can be set."""

import numpy as np

from whet_ops.algorithms.config import KlLossSection, LikelihoodSection
from whet_ppo.config import PpoClipConfig, ValueClipConfig
from whet_ppo.losses import PpoClip, ValueClip
from whet_testing.batches import token_advantages
from whet_testing.contracts.algorithm import AlgorithmContract
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.loss import LossContract


def values(batch, rng):
    return np.where(batch["loss_mask"], rng.normal(size=batch.tokens), 0).astype(np.float32)


class TestPlugin(ComponentContract):
    hooks = "whet_ppo.hooks"


class TestPpo(AlgorithmContract):
    use = "ppo"
    document = {"prompts_per_step": 8}


class TestPpoWithEverything(AlgorithmContract):
    use = "ppo"
    document = {
        "prompts_per_step": 4, "group_size": 2, "minibatches": 2, "epochs": 2, "critic_epochs": 3,
        "count_over": "batch",
        "gae": {"gamma": 0.9, "adaptive_alpha": 0.5, "truncated": "bootstrap"}, "kl_reward": {"weight": 0.1},
        "overlong": {"penalty": 1.0, "buffer": 2, "length": 8}, "correction": {"weights": "token"},
        "clip_reward": [0, 0.5],
        "loss": {"use": "ppo-clip", "likelihood": {"weight": 0.1}, "entropy_weight": 0.01},
    }  # fmt: skip


class TestPpoThatIsHeldNearItsReference(AlgorithmContract):
    use = "ppo"
    document = {
        "prompts_per_step": 8, "kl_reward": {"weight": 0.1, "adaptive": {"target": 0.5, "horizon": 40.0}},
        "top_entropy": {"share": 0.3}, "loss": {"use": "ppo-clip", "kl": {"weight": 0.1}},
    }  # fmt: skip


class TestPpoInOneStep(AlgorithmContract):
    use = "ppo"
    document = {"prompts_per_step": 8, "minibatches": 1, "gae": {"whiten": "none"}}


class TestPpoWithTokensOfLargeCovariance(AlgorithmContract):
    use = "ppo"
    document = {
        "prompts_per_step": 8, "covariance": {"method": "kl-cov", "share": 0.1}, "overlong": {"factor": 0.0},
    }  # fmt: skip


class TestPpoClip(LossContract):
    makers = {"advantages": token_advantages}
    config = PpoClipConfig(clip_high=0.3)

    def make(self):
        return PpoClip(self.config)


class TestPpoClipWithOldLogprobs(TestPpoClip):
    optional_columns = ("old_logprobs",)
    config = PpoClipConfig(aggregation="sequence", clip_dual=3.0)


class TestPpoClipOfSequences(LossContract):
    def make(self):
        return PpoClip(PpoClipConfig())


class TestPpoClipWithLikelihood(TestPpoClip):
    optional_columns = ("old_logprobs",)
    config = PpoClipConfig(likelihood=LikelihoodSection(weight=0.3, at_least=0.5))


class TestPpoClipWithAPenalty(TestPpoClip):
    optional_columns = ("old_logprobs", "version")
    config = PpoClipConfig(
        aggregation="sequence", count_masked=True, clamp_log_ratio=0.0,
        kl=KlLossSection(weight=0.1, importance="sampler"),
    )  # fmt: skip


class TestPpoClipWithEverything(TestPpoClip):
    optional_columns = ("old_logprobs",)
    config = PpoClipConfig(likelihood=LikelihoodSection(weight=0.3, at_least=0.5), entropy_weight=0.1)


class TestValueClip(LossContract):
    makers = {"returns": values, "old_values": values}
    config = ValueClipConfig()

    def make(self):
        return ValueClip(self.config)


class TestValueErrorBySequence(TestValueClip):
    config = ValueClipConfig(clip=0.0, aggregation="sequence")
