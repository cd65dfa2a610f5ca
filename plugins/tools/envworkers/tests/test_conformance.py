import pytest

from whet.config.sections import EnvironmentSection
from whet.config.structure import structure
from whet.plugins.registry import load_plugins
from whet_envworkers.remote import RemoteEnvironment
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract


class TestPlugin(ComponentContract):
    hooks = "whet_envworkers.hooks"


@pytest.fixture(scope="module")
def arithmetic():
    environment = TestArithmeticInProcesses().make()
    yield environment
    environment.close()


class TestArithmeticInProcesses(EnvironmentContract):
    splits = ("train", "test")
    states_answers = True

    def make(self):
        section = structure({"use": "arithmetic", "worker": {"processes": 2}}, EnvironmentSection, load_plugins())
        return RemoteEnvironment(section, "it")

    @pytest.fixture
    def environment(self, arithmetic):
        return arithmetic

    def gold(self, task):
        return f"\\boxed{{{task.data['answer']}}}"
