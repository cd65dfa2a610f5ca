"""An environment that goes wrong in a way that is chosen, for one task of so many; all other answers are worth 1."""

from typing import Literal

from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.records import Task
from whet_sandbox.pool import GraderPool


@frozen
class TroubleConfig:
    """What goes wrong, and how often."""

    kind: Literal["raises", "nan", "unstartable", "hangs", "crashes"]
    """`raises` an error, gives `nan` as the reward, has a grader that is `unstartable`; or one that every answer
    `hangs`, or `crashes`."""
    every: int = 1
    """One task of so many is in trouble."""


class Trouble:
    """The environment `trouble`."""

    reward_weights = {"fine": 1.0}

    def __init__(self, config):
        self.config = config
        graders = {"hangs": hangs, "crashes": crashes}
        self.pool = GraderPool(graders.get(config.kind, "no_such_module:grade"), workers=2, timeout_seconds=0.3)

    def tasks(self, split):
        return [Task(f"Say {n}", {"number": n}) for n in range(16)]

    async def run(self, task, model):
        answer = await model.reply(task.prompt)
        if task.data["number"] % self.config.every:
            return {"fine": 1.0}
        if self.config.kind == "raises":
            raise LookupError(f"nothing is known of {task.data['number']}")
        if self.config.kind == "nan":
            return {"fine": float("nan")}
        return {"fine": await self.pool.call(answer.text)}

    def close(self):
        self.pool.close()


def hangs(text):
    while True:
        pass


def crashes(text):
    raise SystemExit(3)


@hookimpl
def whet_environments():
    return [Component("trouble", TroubleConfig, "troubles:Trouble")]
