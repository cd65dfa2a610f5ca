"""The generator keeps the contract, in this process and on workers of its own."""

import pytest

from whet.component import GeneratorFacts
from whet.interfaces.workers import RoleContext
from whet_hf.config import HfConfig
from whet_hf.facts import facts
from whet_hf.generator import HfGenerator
from whet_testing.contracts.component import MODEL
from whet_testing.contracts.generator import ModelGeneratorContract


class TestInThisProcess(ModelGeneratorContract):
    transports = ("shared", "shared-memory", "disk")
    on_weight_update = ("drain", "continue", "abort")

    def make(self, context: RoleContext) -> HfGenerator:
        return HfGenerator(HfConfig(), context)

    def facts(self) -> GeneratorFacts:
        return facts(HfConfig(), MODEL)


class TestWithTheModelsOwnCode(TestInThisProcess):
    transports = ("disk",)

    def make(self, context: RoleContext) -> HfGenerator:
        return HfGenerator(HfConfig(decoder="plain"), context)


class TestInSmallBatches(TestInThisProcess):
    transports = ("shared-memory",)

    def make(self, context: RoleContext) -> HfGenerator:
        return HfGenerator(HfConfig(max_batch=3), context)


@pytest.mark.slow
class TestOnTwoReplicas(ModelGeneratorContract):
    transports = ("shared-memory", "broadcast", "disk")
    on_weight_update = ("drain", "continue", "abort")
    processes = 2

    def make(self, context: RoleContext) -> HfGenerator:
        return HfGenerator(HfConfig(), context)
