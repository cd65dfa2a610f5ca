"""Two turns, played by an agent that knows OpenAI's client alone; and the same two turns played by the environment."""

import openai
from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.records import Task


@frozen
class TurnsConfig:
    """Nothing to set."""


SECOND = "Now 2468 and 0"


async def agent(base_url, api_key, model, question):
    """Ask twice, with the whole conversation each time, as agents do."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": question}]
        first = await client.chat.completions.create(model=model, messages=messages, max_tokens=50, temperature=1)
        messages += [first.choices[0].message, {"role": "user", "content": SECOND}]
        second = await client.chat.completions.create(model=model, messages=messages)
        return second.choices[0].message.content


class ForeignTurns:
    """The environment `foreign-turns`."""

    reward_weights = {}

    def __init__(self, config):
        pass

    def tasks(self, split):
        return [Task(f"Say {n}") for n in range(50)]

    async def run(self, task, model):
        async with model.endpoint() as address:
            question = task.prompt[0].text
            answer = await agent(address.base_url, address.api_key, address.model, question)
        return {"even": sum(c in "02468" for c in answer) / 8}

    def close(self):
        pass


class OwnTurns(ForeignTurns):
    """The environment `own-turns`."""

    async def run(self, task, model):
        await model.reply(task.prompt)
        answer = await model.reply(SECOND)
        return {"even": sum(c in "02468" for c in answer.text) / 8}


@hookimpl
def whet_environments():
    return [
        Component("foreign-turns", TurnsConfig, "foreign_turns:ForeignTurns"),
        Component("own-turns", TurnsConfig, "foreign_turns:OwnTurns"),
    ]
