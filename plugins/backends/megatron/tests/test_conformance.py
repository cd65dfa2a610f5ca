import importlib.util
from typing import Literal

import pytest

from whet.component import BackendFacts
from whet.interfaces.workers import RoleContext
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig, OptimizerConfig, facts
from whet_megatron.parallel import ParallelConfig
from whet_testing.contracts.backend import BackendContract
from whet_testing.contracts.component import MODEL, ComponentContract
from whet_training.lora_config import LoraConfig

LAYERS: Literal["auto", "test"] = "auto" if importlib.util.find_spec("transformer_engine") else "test"
"""The layers on a GPU: without Transformer Engine, the plain ones can be tested there."""
CONFIG = MegatronConfig(optimizer=OptimizerConfig(lr=1e-2), reference=True, layers=LAYERS)
SPLIT = MegatronConfig(
    optimizer=OptimizerConfig(lr=1e-2), reference=True, parallel=ParallelConfig(tensor=2, sequence=True)
)
STAGES = MegatronConfig(optimizer=OptimizerConfig(lr=1e-2), reference=True, parallel=ParallelConfig(pipeline=2))


class TestPlugin(ComponentContract):
    hooks = "whet_megatron.hooks"


class TestMegatron(BackendContract):
    transports: tuple[str, ...] = ("shared", "shared-memory", "disk")
    has_reference = True
    config = CONFIG

    def make(self, context: RoleContext) -> MegatronBackend:
        return MegatronBackend(self.config, context)

    def facts(self) -> BackendFacts:
        return facts(self.config, MODEL)


@pytest.mark.slow
class TestMegatronWithAnAdapter(TestMegatron):
    adapters = True
    config = MegatronConfig(optimizer=OptimizerConfig(lr=1e-2), lora=LoraConfig(rank=4), layers=LAYERS)


@pytest.mark.slow
class TestMegatronOnTwoTensorRanks(TestMegatron):
    processes = 2
    transports: tuple[str, ...] = ("shared-memory", "disk")
    config = SPLIT


@pytest.mark.slow
class TestMegatronOnTwoStages(TestMegatron):
    processes = 2
    transports: tuple[str, ...] = ("shared-memory", "disk")
    config = STAGES
