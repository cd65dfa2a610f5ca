import numpy as np

from whet.testing.contracts.algorithm import RECORDS, AlgorithmContract
from whet.testing.contracts.component import ComponentContract
from whet.testing.contracts.loss import LossContract
from whet_dpo import config, losses, unpaired


class TestPlugin(ComponentContract):
    hooks = "whet_dpo.hooks"


class TestDpoLoop(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4}


class TestDpoLoopOnTheFly(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4, "reference": "on-the-fly", "loss": {"use": "ipo"}}


class TestDpoLoopWithoutReference(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4, "loss": {"use": "simpo"}}


class TestOrpoLoopOfWholeConversations(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4, "loss": {"use": "orpo", "sft": {"of": "conversation", "weight": 1.0}}}


class TestKtoLoop(AlgorithmContract):
    use = "kto"
    document = {"batch_size": 4}
    records = [{"prompt": f"{i}+1?", "completion": f"{i + 1}", "label": i % 3 == 0} for i in range(20)]


class TestKtoLoopOnPairs(AlgorithmContract):
    use = "kto"
    document = {"batch_size": 4, "baseline": "none"}
    records = RECORDS["pairs"]


class PairContract(LossContract):
    unit_size = 2
    makes = losses.Dpo(config.DpoLossConfig())

    def make(self):
        return self.makes


class TestDpo(PairContract):
    pass


class TestDpoWithEverything(PairContract):
    sft = config.SftTerm(weight=0.3, average="sequence")
    makes = losses.Dpo(config.DpoLossConfig(beta=0.5, average_logprobs=True, sft=sft, label_smoothing=0.1))


class TestOrpoOfWholeConversations(PairContract):
    makes = losses.Orpo(config.OrpoConfig(sft=config.SftTerm(weight=1.0, of="conversation")))
    makers = {"answer_mask": lambda batch, rng: batch["loss_mask"] & (rng.random(batch.tokens) < 0.6)}


class TestRobustDpo(PairContract):
    makes = losses.RobustDpo(config.RobustDpoConfig())


class TestIpo(PairContract):
    makes = losses.Ipo(config.IpoConfig())


class TestIpoOfWholeAnswers(PairContract):
    makes = losses.Ipo(config.IpoConfig(average_logprobs=False, sft=config.SftTerm(weight=1.0, average="none")))


class TestHinge(PairContract):
    makes = losses.Hinge(config.HingeConfig())


class TestApoZero(PairContract):
    makes = losses.ApoZero(config.ApoZeroConfig())


class TestApoDown(PairContract):
    makes = losses.ApoDown(config.ApoDownConfig())


class TestSimpo(PairContract):
    makes = losses.Simpo(config.SimpoConfig())


class TestOrpo(PairContract):
    makes = losses.Orpo(config.OrpoConfig())


class TestKto(LossContract):
    makers = {
        "desirable": lambda batch, rng: rng.random(batch.sequences) < 0.5,
        "kl_baseline": lambda batch, rng: np.full(batch.sequences, 0.7, np.float32),
    }

    def make(self):
        return unpaired.Kto(config.KtoLossConfig(desirable_weight=1.3, undesirable_weight=0.7))


class TestKtoByKinds(TestKto):
    def make(self):
        return unpaired.Kto(config.KtoLossConfig(desirable_weight=1.3, average="kinds"))


class TestKtoOnPairs(TestKto):
    unit_size = 2
    makers = {**TestKto.makers, "desirable": lambda batch, rng: np.diff(batch["unit"], prepend=-1) != 0}
