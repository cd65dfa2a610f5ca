"""The environment `nemo-gym`: records of NeMo Gym, played with a resources server.

seed the session -> response with calls -> the server runs the tools -> response ... without calls -> verify
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from whet.data.messages import Call, Conversation, Message
from whet.data.records import Task
from whet.errors import ContextFull, DataError
from whet.interfaces.environment import Model
from whet_data.quoting import shown
from whet_data.readers import Row
from whet_data.servers import token_in
from whet_data.tasks import DatasetTasks
from whet_env_nemo_gym.config import NemoGymConfig
from whet_env_nemo_gym.rows import names_of, opening, parameters, response, result, tools_of, written
from whet_env_nemo_gym.server import Server, Session


class NemoGym:
    """The environment `nemo-gym`. A split is loaded when it is first used."""

    def __init__(self, config: NemoGymConfig) -> None:
        self._config = config
        token = token_in(config.token_variable, "nemo-gym.token_variable")
        self._server = Server(config.url, token, config.seconds, config.reply_bytes)
        self._free = asyncio.Semaphore(config.sessions)
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

        Raises `InfrastructureError`, and `EpisodeError` if the server does not take the record.
        """
        record = task.data["record"]
        params = parameters(record)
        tools = tools_of(params.get("tools"))
        names, talk = names_of(tools), model.with_tools(tools) if tools else model
        items: list[dict[str, Any]] = []
        turns = calls = 0
        messages: Conversation = task.prompt
        async with self._free, self._server.session(record) as session:
            with suppress(ContextFull):  # what there is is verified
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
        if components:
            model.record("reward_components", json.dumps(components))
        own = {name: components.get(name, 0.0) for name in self._config.components}
        return {"reward": reward, "turns": float(turns), "calls": float(calls), **own}

    def close(self) -> None:
        """Do nothing: sessions end with their episodes."""

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
        params = parameters(row.record)
        if unfit := [name for name in names_of(tools_of(params.get("tools"))) if not name.isidentifier()]:
            raise DataError(f"a tool is called {unfit[0]!r:.80}, wanted letters, digits and underscores")
        prompt = opening(self._config.system, params["input"])
        return Task(prompt, {"record": dict(row.record)}, id=str(row.record.get("id") or row.where))
