from whet.interfaces.logger import RunInfo
from whet_console.config import ConsoleConfig
from whet_console.logger import ConsoleLogger
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.logger import LoggerContract


class TestPlugin(ComponentContract):
    hooks = "whet_console.hooks"


class TestConsole(LoggerContract):
    def make(self, run: RunInfo) -> ConsoleLogger:
        return ConsoleLogger(ConsoleConfig(every=1), run)
