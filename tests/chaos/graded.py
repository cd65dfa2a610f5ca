"""Plugin of the runs that are disturbed: an environment with graders, and a record of what the driver is doing.

Every phase and every line of the journal is also written to the file that CHAOS_MOMENTS names, so that whoever
disturbs a run can wait for a moment. Nothing else differs from a run without it.
"""

import os
import time
from contextlib import contextmanager

from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.records import Task
from whet.data.spans import Spans
from whet.run.run_folder import RunFolder
from whet_sandbox.pool import GraderPool

TASKS = 50


@frozen
class GradedConfig:
    """Nothing to set."""


class Graded:
    """Rewards every even digit, counted in a process of its own."""

    reward_weights = {}

    def __init__(self, config):
        self.pool = GraderPool(share_of_even_digits, workers=2, timeout_seconds=4.0)

    def tasks(self, split):
        return [Task(f"Say {n}") for n in range(TASKS)]

    async def run(self, task, model):
        answer = await model.reply(task.prompt)
        return {"even": await self.pool.call(answer.text)}

    def close(self):
        self.pool.close()


def share_of_even_digits(text):
    return sum(letter in "02468" for letter in text) / 12


@hookimpl
def whet_environments():
    return [Component("graded", GradedConfig, "graded:Graded")]


@hookimpl
def whet_check_config(config):
    """Begin to record; this hook is called in the driver alone, and before any worker is started."""
    file = os.environ.get("CHAOS_MOMENTS")
    if file:
        record_moments(os.open(file, os.O_WRONLY | os.O_APPEND))
    return ()


def record_moments(descriptor):
    def say(what):
        os.write(descriptor, f"{time.time():.6f} {what}\n".encode())

    phase, journal = Spans.phase, RunFolder.journal

    @contextmanager
    def recorded_phase(self, role, name):
        say(f"begin {role}.{name}")
        try:
            with phase(self, role, name):
                yield
        finally:
            say(f"end {role}.{name}")

    def recorded_journal(self, event, **details):
        journal(self, event, **details)
        say(f"begin after.{event.replace(' ', '-')}")

    Spans.phase, RunFolder.journal = recorded_phase, recorded_journal
