"""Two turns: a greeting is answered by the environment, and even digits in the second answer are rewarded."""

from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.messages import Message
from whet.data.records import Task


@frozen
class TwoTurnsConfig:
    """Nothing to set."""


SECOND = "Now 2468 and 0"


class TwoTurns:
    """The environment `two-turns`."""

    reward_weights = {}

    def __init__(self, config):
        pass

    def tasks(self, split):
        return [Task(f"Say {n}") for n in range(50)]

    async def run(self, task, model):
        await model.reply(task.prompt)
        return graded((await model.reply([Message("user", SECOND)])).text)

    def close(self):
        pass


def graded(answer):
    """Reward the share of even digits among eight characters."""
    return {"even": sum(c in "02468" for c in answer) / 8}


@hookimpl
def whet_environments():
    return [Component("two-turns", TwoTurnsConfig, "two_turns:TwoTurns")]
