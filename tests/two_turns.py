"""Two turns: a greeting is answered by the environment, and even digits in the second answer are rewarded."""

from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.messages import Message
from whet.data.records import Task


@frozen
class TwoTurnsConfig:
    """Nothing to set."""


class TwoTurns:
    """The environment `two-turns`."""

    reward_weights = {}

    def __init__(self, config):
        pass

    def tasks(self, split):
        return [Task(f"Say {n}") for n in range(50)]

    async def run(self, task, model):
        await model.reply(task.prompt)
        answer = await model.reply([Message("user", "Now 2468 and 0")])
        return {"even": sum(c in "02468" for c in answer.text) / 8}

    def close(self):
        pass


@hookimpl
def whet_environments():
    return [Component("two-turns", TwoTurnsConfig, "two_turns:TwoTurns")]
