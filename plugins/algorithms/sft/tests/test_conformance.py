from whet_sft.config import NllConfig
from whet_sft.losses import Nll
from whet_testing.contracts.algorithm import AlgorithmContract
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.loss import LossContract


class TestPlugin(ComponentContract):
    hooks = "whet_sft.hooks"


class TestSft(AlgorithmContract):
    use = "sft"
    document = {"batch_size": 4}


class TestNll(LossContract):
    def make(self) -> Nll:
        return Nll(NllConfig())


class TestNllWeightedByProbability(LossContract):
    def make(self) -> Nll:
        return Nll(NllConfig(weighting="probability"))
