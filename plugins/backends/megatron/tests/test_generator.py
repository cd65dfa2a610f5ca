"""The generator keeps the contract of generators, with weights of its own."""

import pytest

from whet.component import GeneratorFacts
from whet.interfaces.workers import RoleContext
from whet_megatron.generator.config import MegatronGeneratorConfig, facts
from whet_megatron.generator.handle import MegatronGenerator
from whet_megatron.parallel import ParallelConfig
from whet_testing.contracts.component import MODEL
from whet_testing.contracts.generator import ModelGeneratorContract

OWN = MegatronGeneratorConfig(weights="own", cache_gib=0.02, max_batch=64)


class TestOwnWeights(ModelGeneratorContract):
    transports: tuple[str, ...] = ("shared", "shared-memory", "disk")
    on_weight_update = ("drain", "continue", "abort")
    config = OWN

    def make(self, context: RoleContext) -> MegatronGenerator:
        return MegatronGenerator(self.config, context)

    def facts(self) -> GeneratorFacts:
        return facts(self.config, MODEL)
