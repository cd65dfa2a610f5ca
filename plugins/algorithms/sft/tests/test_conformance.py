from whet.testing.contracts.algorithm import AlgorithmContract
from whet.testing.contracts.component import ComponentContract
from whet.testing.contracts.loss import LossContract
from whet_sft.config import NllConfig
from whet_sft.losses import Nll


class TestPlugin(ComponentContract):
    hooks = "whet_sft.hooks"


class TestSft(AlgorithmContract):
    use = "sft"
    document = {"batch_size": 4}


class TestNll(LossContract):
    def make(self) -> Nll:
        return Nll(NllConfig())
