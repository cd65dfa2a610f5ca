"""An environment whose n-th answer, over the whole process, strikes a worker process of its run a moment later."""

import asyncio
import os
import signal
import threading
from typing import Literal

from attrs import Factory, frozen

from whet import hookimpl
from whet.component import Component
from whet.data.records import Task
from whet_testing.processes import descendants


@frozen
class StrikingConfig:
    """Whom to strike, and when."""

    victim: str = ""
    """Name of a worker process, e.g. `generator-1`; empty: nobody."""
    signal: Literal["SIGKILL", "SIGSTOP"] = "SIGKILL"
    questions: list[int] = Factory(list)
    """Strike when so many questions were asked; until then it stands still, so that it dies with what it was asked."""
    answers: list[int] = Factory(list)
    """Strike when so many answers came."""
    delay_seconds: float = 0.02


_asked, _answered = [0], [0]  # of the process: a run that begins again is not struck again


class Striking:
    """Rewards even digits."""

    reward_weights = {}

    def __init__(self, config: StrikingConfig) -> None:
        self.config = config

    def tasks(self, split: str) -> list[Task]:
        """Return fifty prompts."""
        return [Task(f"Say {n}") for n in range(50)]

    async def run(self, task, model):
        """Ask once."""
        _asked[0] += 1
        if _asked[0] in self.config.questions:
            self.send(signal.SIGSTOP)
            threading.Timer(max(self.config.delay_seconds, 0.3), self.strike).start()
        answer = await model.reply(task.prompt)
        _answered[0] += 1
        if _answered[0] in self.config.answers:
            await asyncio.sleep(0)
            threading.Timer(self.config.delay_seconds, self.strike).start()
        return {"even": sum(c in "02468" for c in answer.text) / 12}

    def strike(self) -> None:
        """Send the signal of the config."""
        self.send(getattr(signal, self.config.signal))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the victim."""
        for process in descendants():
            if "whet.runtime.worker_process" in process.command and process.command.endswith(self.config.victim):
                os.kill(process.pid, number)

    def close(self) -> None:
        """Nothing is held."""


@hookimpl
def whet_environments():
    """Offer `striking`."""
    return [Component("striking", StrikingConfig, "striking:Striking")]
