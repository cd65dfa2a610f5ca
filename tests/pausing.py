"""A backend and an environment that compute nothing, and stop at one moment of a run until a file is there.

Each says on standard output that it is there: `at MOMENT`.
"""

import asyncio
import time
from pathlib import Path

from attrs import frozen

from whet import hookimpl
from whet.component import BackendFacts, Component, GeneratorFacts
from whet.data.records import Task
from whet_testing.fakes import FakeBackend, FakeGenerator


@frozen
class PausingConfig:
    """Where to stop, and what lets it go on."""

    moment: str = ""
    go: str = ""

    def here(self, moment):
        if moment == self.moment and not Path(self.go).exists():
            print(f"at {moment}", flush=True)
            return True
        return False

    def pause(self, moment):
        if self.here(moment):
            while not Path(self.go).exists():
                time.sleep(0.01)


class PausingBackend(FakeBackend):
    def __init__(self, config, site):
        super().__init__()
        self.config = config
        config.pause("start-up")

    def train(self, batch, loss, count_over=None):
        self.config.pause("step")
        return super().train(batch, loss, count_over)

    def save(self, folder):
        self.config.pause("saving")
        return super().save(folder)

    def export(self, folder):
        self.config.pause("export")
        super().save(folder)

    def close(self):
        self.config.pause("closing")
        super().close()


class Generator(FakeGenerator):
    def __init__(self, config, site):
        super().__init__(lambda prompt, rng: "".join(rng.choice(list("ab"), rng.integers(1, 5))))


class Letters:
    """Rewards the length of the answer."""

    reward_weights = {}

    def __init__(self, config):
        self.config = config

    def tasks(self, split):
        return [Task(f"Say {n}", {"split": split}) for n in range(4)]

    async def run(self, task, model):
        if self.config.here("evaluation" if task.data["split"] == "test" else "rollouts"):
            while not Path(self.config.go).exists():
                await asyncio.sleep(0.01)
        return {"long": float(len((await model.reply(task.prompt)).tokens) > 3)}

    def close(self):
        """Hold nothing."""


def backend_facts(config, model):
    return BackendFacts(outputs_given=frozenset({"logprobs"}), transports=("disk",))


def generator_facts(config, model):
    return GeneratorFacts(transports=("disk",))


@hookimpl
def whet_backends():
    return [Component("pausing", PausingConfig, f"{__name__}:PausingBackend", facts=f"{__name__}:backend_facts")]


@hookimpl
def whet_generators():
    return [Component("letters", PausingConfig, f"{__name__}:Generator", facts=f"{__name__}:generator_facts")]


@hookimpl
def whet_environments():
    return [Component("letters", PausingConfig, f"{__name__}:Letters")]
