"""A backend and a generator that compute nothing, and take as long as they are told: for what stands around models.

With everything on the driver and no torch, a run starts in a moment and can be killed often. As a program it waits for
configs, a line of JSON each, runs each in a process of its own, and says its number and how it ended.
"""

import importlib
import json
import os
import random
import sys
import time
import traceback

from attrs import frozen

import whet.run.compose
from whet import hookimpl
from whet.component import BackendFacts, Component, GeneratorFacts
from whet.data.records import Task
from whet.errors import WhetError
from whet_testing.fakes import FakeBackend, FakeGenerator


@frozen
class InstantConfig:
    """How long it takes."""

    seconds: float = 0.0
    """For an optimizer step, or for an answer."""
    jitter: float = 0.0
    """At least so much longer, at random: often little more, at times very much."""

    def took(self):
        return self.seconds + self.jitter * min(random.paretovariate(1.0), 50.0)


class InstantBackend(FakeBackend):
    def __init__(self, config, site):
        super().__init__()
        self.config = config

    def train(self, batch, loss, count_over=None):
        time.sleep(self.config.took())
        return super().train(batch, loss, count_over)


class InstantGenerator(FakeGenerator):
    """Says letters. Requests that run when weights arrive end with the old version.

    It refuses requests of training and of evaluation at one time.
    """

    def __init__(self, config, site):
        super().__init__(lambda prompt, rng: "".join(rng.choice(list("ab"), rng.integers(1, 5))))
        self.config = config
        self.under_way = []

    async def generate(self, request):
        purpose = request.id.split("-")[0]
        self.under_way.append(purpose)
        self._delay = self.config.took()
        try:
            made = await super().generate(request)
            if len(set(self.under_way)) > 1:
                raise WhetError("training and evaluation had requests under way at one time")
            return made
        finally:
            self.under_way.remove(purpose)


@frozen
class LettersConfig:
    """Which tasks fail."""

    failing: int = 0
    """One task of so many fails; 0: none."""


class Letters:
    """Rewards the length of the answer."""

    reward_weights = {}

    def __init__(self, config):
        self.config = config

    def tasks(self, split):
        return [Task(f"Say {n}", {"number": n}) for n in range(40)]

    async def run(self, task, model):
        answer = await model.reply(task.prompt)
        if self.config.failing and task.data["number"] % self.config.failing == 0:
            raise LookupError("nothing is known of it")
        return {"long": float(len(answer.tokens) > 3)}

    def close(self):
        """Hold nothing."""


def backend_facts(config, model):
    return BackendFacts(outputs_given=frozenset({"logprobs"}), transports=("disk",))


def generator_facts(config, model):
    return GeneratorFacts(transports=("disk",))


@hookimpl
def whet_backends():
    return [Component("instant", InstantConfig, f"{__name__}:InstantBackend", facts=f"{__name__}:backend_facts")]


@hookimpl
def whet_generators():
    return [Component("instant", InstantConfig, f"{__name__}:InstantGenerator", facts=f"{__name__}:generator_facts")]


@hookimpl
def whet_environments():
    return [Component("letters", LettersConfig, f"{__name__}:Letters")]


def serve():
    """Run one config after the other; see above."""
    for module in ("whet.run.builder", "whet.run.models", "whet.evaluation.evaluate", "whet.rollout.stream"):
        importlib.import_module(module)  # once, before the first fork

    for line in sys.stdin:
        path, *overrides = json.loads(line)
        process = os.fork()
        if process == 0:
            code = 1
            try:
                code = 0 if whet.run.compose.run(path, overrides).finished else 2
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
