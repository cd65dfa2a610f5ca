import numpy as np

from whet_rm.config import BradleyTerryConfig
from whet_rm.losses import BradleyTerry
from whet_testing.contracts.algorithm import RECORDS, AlgorithmContract
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.loss import LossContract


class TestPlugin(ComponentContract):
    hooks = "whet_rm.hooks"


class TestLoop(AlgorithmContract):
    use = "rm"
    document = {"batch_size": 4}


class TestLoopWithMargins(AlgorithmContract):
    use = "rm"
    document = {"batch_size": 4, "fields": {"margin": "by"}, "loss": {"use": "bradley-terry", "margin": 1.0}}
    records = [{**record, "by": i % 3} for i, record in enumerate(RECORDS["pairs"])]


class TestBradleyTerry(LossContract):
    unit_size = 2

    def make(self):
        return BradleyTerry(BradleyTerryConfig())


class TestBradleyTerryWithEverything(TestBradleyTerry):
    makers = {"margin": lambda batch, rng: (batch["unit"] % 3).astype(np.float64)}

    def make(self):
        return BradleyTerry(BradleyTerryConfig(margin=0.5, label_smoothing=0.1, centering=0.01))
