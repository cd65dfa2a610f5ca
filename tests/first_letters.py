"""One question or two, and what letter came first in the end: something that samples of a random model differ in."""

from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.records import Task
from whet.errors import InfrastructureError


@frozen
class FirstConfig:
    """Which first letters are right."""

    turns: int = 1
    """Questions."""
    right: str = "abcdefghijklm"
    """First letters that are right, of those that are letters."""
    unreachable: int = -1
    """Task whose grader is never there."""


class First:
    """The environment `first`."""

    reward_weights = {"right": 1.0, "short": 0.5}

    def __init__(self, config):
        self._config = config

    def tasks(self, split):
        return [Task(f"Say {n}", {"n": n}) for n in range(8)]

    async def run(self, task, model):
        reply = await model.reply(task.prompt)
        for _ in range(self._config.turns - 1):
            reply = await model.reply("And now?")
        if task.data["n"] == self._config.unreachable:
            raise InfrastructureError("the grader is gone")
        letter = self._letter(reply.text)
        return {
            "right": float(letter is not None and letter in self._config.right),
            "short": float(len(reply.text) < 20),
        }

    def final_answer(self, messages):
        return self._letter(messages[-1].text)

    def _letter(self, text):
        return next((c.lower() for c in text if c.isascii() and c.isalpha()), None)

    def close(self):
        pass


@hookimpl
def whet_environments():
    return [Component("first", FirstConfig, "first_letters:First")]
