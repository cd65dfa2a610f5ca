"""The two turns of `two_turns.py`, played by an agent that knows OpenAI's client alone."""

from pathlib import Path

import openai

from whet import hookimpl
from whet.component import Component, import_file

own = import_file(Path(__file__).with_name("two_turns.py"))


async def agent(base_url, api_key, model, question):
    """Ask twice, with the whole conversation each time, as agents do."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": question}]
        first = await client.chat.completions.create(model=model, messages=messages, max_tokens=50, temperature=1)
        messages += [first.choices[0].message, {"role": "user", "content": own.SECOND}]
        second = await client.chat.completions.create(model=model, messages=messages)
        return second.choices[0].message.content


class ForeignTurns(own.TwoTurns):
    """The environment `foreign-turns`."""

    async def run(self, task, model):
        async with model.endpoint() as address:
            question = task.prompt[0].text
            answer = await agent(address.base_url, address.api_key, address.model, question)
        return own.graded(answer)


@hookimpl
def whet_environments():
    return [Component("foreign-turns", own.TwoTurnsConfig, "foreign_turns:ForeignTurns")]
