"""A generator whose process dies of one prompt whenever it gets it, and tasks among which that prompt is."""

import os
import signal
from pathlib import Path

import attrs
from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.records import Task
from whet_hf.config import HfConfig

TASKS, DEADLY = 50, "Say 7, and 7 again, and 7 again, and 7 again, and 7 again"


@frozen
class FragileConfig(HfConfig):
    """The keys of `hf`, and what it dies of."""

    longest_prompt: int = 40
    """In tokens; a longer one kills the process."""


@frozen
class FragileWorkerGroup:
    """Spawns fragile workers."""

    whole: object
    longest_prompt: int

    def spawn(self, target, arguments):
        target = f"file:{Path(__file__).resolve()}:FragileWorker"
        return self.whole.spawn(target, {"longest_prompt": self.longest_prompt, **arguments})


def fragile(config, site):
    """Build the generator `hf` with fragile workers."""
    from whet_hf.generator import HfGenerator

    return HfGenerator(
        config, attrs.evolve(site, worker_group=FragileWorkerGroup(site.worker_group, config.longest_prompt))
    )


class FragileWorker:
    """The worker of `hf`, as long as no prompt is too long."""

    def __init__(self, rank, *, longest_prompt, **arguments):
        from whet_hf.worker import Worker

        self._longest, self._worker = longest_prompt, Worker(rank, **arguments)

    def __getattr__(self, name):
        return getattr(self._worker, name)

    async def generate(self, requests):
        if any(len(request.tokens) > self._longest for request in requests):
            os.kill(os.getpid(), signal.SIGSEGV)
        async for outcomes in self._worker.generate(requests):
            yield outcomes


@frozen
class SevensConfig:
    """Nothing to set."""


class Sevens:
    """Rewards even digits."""

    reward_weights = {}

    def __init__(self, config):
        pass

    def tasks(self, split):
        return [Task(DEADLY if n == 7 else f"Say {n}") for n in range(TASKS)]

    async def run(self, task, model):
        answer = await model.reply(task.prompt)
        return {"even": sum(c in "02468" for c in answer.text) / 12}

    def close(self):
        pass


@hookimpl
def whet_generators():
    return [Component("fragile", FragileConfig, "fragile:fragile", facts="whet_hf.facts:facts")]


@hookimpl
def whet_environments():
    return [Component("sevens", SevensConfig, "fragile:Sevens")]
