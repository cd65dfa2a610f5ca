from whet.cluster.slices import Site
from whet.testing.contracts.component import ComponentContract
from whet.testing.contracts.generator import ModelGeneratorContract
from whet_hf.config import HfConfig
from whet_hf.generator import HfGenerator


class TestPlugin(ComponentContract):
    hooks = "whet_hf.hooks"


class TestHf(ModelGeneratorContract):
    transports: tuple[str, ...] = ("shared", "shared-memory", "disk")

    def make(self, site: Site) -> HfGenerator:
        return HfGenerator(HfConfig(), site)


class TestHfOnTwoProcesses(TestHf):
    processes = 2
    transports: tuple[str, ...] = ("shared-memory", "disk")
