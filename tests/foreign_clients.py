"""The two turns of `two_turns.py`, played by clients and agents of others, each in its own way.

A task's position decides who plays it: the first of `clients`, the second, and so on, and then the first again.
"""

from pathlib import Path

import openai
from attrs import Factory, frozen

from whet import hookimpl
from whet.component import Component, import_file

own = import_file(Path(__file__).with_name("two_turns.py"))


@frozen
class ForeignClientsConfig:
    """Who plays."""

    clients: list[str] = Factory(list)
    """Names of functions of this file."""


async def chat_stream(address, question):
    messages = [{"role": "user", "content": question}]
    async with client(address) as asking:
        for second in (True, False):
            stream = await asking.chat.completions.create(model=address.model, messages=messages, stream=True)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": own.SECOND}] * second
    return said


async def responses(address, question):
    async with client(address) as asking:
        items = [{"role": "user", "content": question}]
        first = await asking.responses.create(model=address.model, input=items)
        items += [item.model_dump(exclude_unset=True) for item in first.output]
        items.append({"role": "user", "content": own.SECOND})
        return (await asking.responses.create(model=address.model, input=items)).output_text


async def responses_stream(address, question):
    async with client(address) as asking, asking.responses.stream(model=address.model, input=question) as stream:
        first = await stream.get_final_response()
        following = {"input": own.SECOND, "previous_response_id": first.id}
        async with asking.responses.stream(model=address.model, **following) as stream:
            return (await stream.get_final_response()).output_text


async def agents_sdk(address, question):
    """openai-agents, with its default dialect: Responses."""
    from agents import Agent, OpenAIResponsesModel, RunConfig, Runner

    async with client(address) as asking:
        agent = Agent(name="counter", model=OpenAIResponsesModel(address.model, asking))
        quiet = RunConfig(tracing_disabled=True)
        first = await Runner.run(agent, question, run_config=quiet)
        items = [*first.to_input_list(), {"role": "user", "content": own.SECOND}]
        return (await Runner.run(agent, items, run_config=quiet)).final_output


async def agents_sdk_stream(address, question):
    from agents import Agent, OpenAIResponsesModel, RunConfig, Runner

    async with client(address) as asking:
        agent = Agent(name="counter", model=OpenAIResponsesModel(address.model, asking))
        items = [{"role": "user", "content": question}]
        for second in (True, False):
            result = Runner.run_streamed(agent, items, run_config=RunConfig(tracing_disabled=True))
            async for _ in result.stream_events():
                pass
            items = [*result.to_input_list(), {"role": "user", "content": own.SECOND}] if second else items
        return result.final_output


async def langchain(address, question):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model=address.model, base_url=address.base_url, api_key=address.api_key), [])
    first = await agent.ainvoke({"messages": [("user", question)]})
    second = await agent.ainvoke({"messages": [*first["messages"], ("user", own.SECOND)]})
    return second["messages"][-1].content


async def anthropic(address, question):
    """Anthropic's client: the first turn in one piece, the second as a stream."""
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=address.base_url.removesuffix("/v1"), api_key=address.api_key) as asking:
        common = {"model": address.model, "max_tokens": 50}
        messages = [{"role": "user", "content": question}]
        first = await asking.messages.create(messages=messages, **common)
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": own.SECOND}]
        async with asking.messages.stream(messages=messages, **common) as stream:
            return await stream.get_final_text()


def client(address):
    return openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key)


class ForeignClients(own.TwoTurns):
    """The environment `foreign-clients`."""

    def __init__(self, config):
        self._clients = [globals()[name] for name in config.clients]
        self._tasks = super().tasks("train")

    async def run(self, task, model):
        plays = self._clients[self._tasks.index(task) % len(self._clients)]
        async with model.endpoint() as address:
            answer = await plays(address, task.prompt[0].text)
        return own.graded(answer)


@hookimpl
def whet_environments():
    return [Component("foreign-clients", ForeignClientsConfig, "foreign_clients:ForeignClients")]
