import pytest

from whet.component import BackendFacts
from whet.interfaces.workers import RoleContext
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config, OptimizerConfig, facts
from whet_testing.contracts.backend import BackendContract
from whet_testing.contracts.component import MODEL, ComponentContract

CONFIG = Fsdp2Config(optimizer=OptimizerConfig(lr=1e-2), reference=True)


class TestPlugin(ComponentContract):
    hooks = "whet_fsdp2.hooks"


class TestFsdp2(BackendContract):
    transports: tuple[str, ...] = ("shared", "shared-memory", "disk")
    has_reference = True

    def make(self, context: RoleContext) -> Fsdp2Backend:
        return Fsdp2Backend(CONFIG, context)

    def facts(self) -> BackendFacts:
        return facts(CONFIG, MODEL)


@pytest.mark.slow
class TestFsdp2OnTwoProcesses(TestFsdp2):
    processes = 2
    transports: tuple[str, ...] = ("shared-memory", "disk")
