"""The environment `nemo-gym`: records of NeMo Gym, played with a resources server, or by agent servers.

with a resources server    seed the session -> response with calls -> the server runs the tools -> ... -> verify
by an agent server         open the episode's endpoint -> run; the agent asks the model there -> reward
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from whet.data.messages import Call, Conversation, Message
from whet.data.records import Task
from whet.errors import ContextFull, DataError, EpisodeError
from whet.interfaces.environment import Model
from whet_data.quoting import shown
from whet_data.readers import Row
from whet_data.servers import token_in
from whet_data.tasks import DatasetTasks
from whet_env_nemo_gym.config import NemoGymConfig
from whet_env_nemo_gym.rows import (
    agent_of,
    for_agent,
    names_of,
    opening,
    parameters,
    response,
    result,
    tools_of,
    written,
)
from whet_env_nemo_gym.server import Server, Session
from whet_sandbox.gate import Gate

OWN_SAMPLING = ("model", "parallel_tool_calls", "temperature", "top_p")
"""Parameters of an agent's requests that are not read: the policy samples as the run has it."""


class NemoGym:
    """The environment `nemo-gym`. A split is loaded when it is first used."""

    def __init__(self, config: NemoGymConfig) -> None:
        self._config = config
        token = token_in(config.token_variable, "nemo-gym.token_variable")
        self._server = Server(config.url, token, config.seconds, config.reply_bytes)
        self._agents = {
            name: Server(url, token, config.agent_seconds, config.reply_bytes) for name, url in config.agents.items()
        }
        self._free = Gate(config.sessions)
        self._tasks = DatasetTasks(config, self._task)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `reward`, the server's. Its components, `turns` and `calls` are only recorded."""
        return {"reward": 1.0, "turns": 0.0, "calls": 0.0, **dict.fromkeys(self._config.components, 0.0)}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raises `DataError` with file and line."""
        return self._tasks(split)

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode in a session of its own. Returns its rewards.

        Raises `InfrastructureError`, and `EpisodeError` if the server refuses the record.
        """
        record = task.data["record"]
        if (agent := self._agents.get(agent_of(record))) is not None:
            return await self._by_agent(agent, task, model)
        params = parameters(record)
        tools = tools_of(params.get("tools"))
        names, talk = names_of(tools), model.with_tools(tools) if tools else model
        items: list[dict[str, Any]] = []
        turns = calls = 0
        messages: Conversation = task.prompt
        async with self._free.place(), self._server.session(record) as session:
            with suppress(ContextFull):  # the responses so far are verified
                while turns < self._config.turns:
                    reply = await talk.reply(messages)
                    turns += 1
                    items += written(f"{turns}", reply.text, reply.calls, self._config.reasoning_end)
                    if not reply.calls:
                        break
                    calls += len(reply.calls)
                    results = [await self._called(session, call, names) for call in reply.calls]
                    items += [result(call, text) for call, text in zip(reply.calls, results, strict=True)]
                    messages = tuple(
                        Message("tool", shown(text, self._config.tool_characters), answers=call.id)
                        for call, text in zip(reply.calls, results, strict=True)
                    )
            reward, components = await session.verified(record, response(params, items, f"{task.id}"))
        return self._rewards(model, reward, components, turns, calls)

    def close(self) -> None:
        """Do nothing: sessions end with their episodes."""

    async def _by_agent(self, agent: Server, task: Task, model: Model) -> Mapping[str, float]:
        async with self._free.place(), model.endpoint(ignore=OWN_SAMPLING) as address:
            record = for_agent(task.data["record"], self._config.system, address.api_key)
            reward, components = await agent.played(record)
            talks = address.conversations()
        if not talks:
            raise EpisodeError(
                f"the agent server {agent.url} played without this model: its model server must be "
                f"{address.base_url.removesuffix('/v1')}, and it must hand the metadata of the record on"
            )
        given = {task.prompt[:n] for n in range(len(task.prompt) + 1)}
        said = {talk[:n] for talk in talks for n in range(1, len(talk) + 1)} - given  # forks have a common beginning
        turns, calls = (sum(talk[-1].role == role for talk in said) for role in ("assistant", "tool"))
        return self._rewards(model, reward, components, turns, calls)

    def _rewards(
        self, model: Model, reward: float, components: Mapping[str, float], turns: int, calls: int
    ) -> Mapping[str, float]:
        if components:
            model.record("reward_components", json.dumps(components))
        own = {name: components.get(name, 0.0) for name in self._config.components}
        return {"reward": reward, "turns": float(turns), "calls": float(calls), **own}

    async def _called(self, session: Session, call: Call, names: frozenset[str]) -> str:
        """Return a tool's answer. A name becomes a part of an address, so it must be one of the record's."""
        if call.name not in names:
            return json.dumps({"error": f"there is no such tool; there are {', '.join(sorted(names))}"})
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, Mapping):
            return json.dumps({"error": "the arguments are no JSON object"})
        return await session.tool(call.name, arguments)

    def _task(self, row: Row) -> Task:
        params, config, name = parameters(row.record), self._config, str(row.record.get("id") or row.where)
        if (agent := agent_of(row.record)) in self._agents:
            return Task(_described(config.system, params["input"]), {"record": dict(row.record)}, id=name)
        if not config.url:
            found = f"`agent_ref` names {agent!r:.80}" if agent else "there is no `agent_ref`"
            raise DataError(f"{found}, and agents has {', '.join(self._agents)}; add it there, or a `url`")
        if unfit := [name for name in names_of(tools_of(params.get("tools"))) if not name.isidentifier()]:
            raise DataError(f"a tool is called {unfit[0]!r:.80}, wanted letters, digits and underscores")
        return Task(opening(config.system, params["input"]), {"record": dict(row.record)}, id=name)


def _described(system: str, items: Any) -> Conversation:
    """Return the request to an agent as messages, for records and reports. Other requests are shown as JSON."""
    try:
        return opening(system, items)
    except DataError:
        return (Message("user", json.dumps(items, ensure_ascii=False)),)
