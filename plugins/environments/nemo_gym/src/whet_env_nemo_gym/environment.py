"""The environment `nemo-gym`: records of NeMo Gym, played with a resources server.

seed the session -> response with calls -> the server runs the tools -> response ... without calls -> verify
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from whet.data.messages import Call, Conversation, Message
from whet.data.records import Task
from whet.errors import ConfigError, ContextFull, DataError
from whet.interfaces.environment import Model
from whet_data.quoting import without_markers
from whet_data.readers import Row
from whet_data.tasks import load_tasks, split_file
from whet_env_nemo_gym.config import NemoGymConfig
from whet_env_nemo_gym.rows import names_of, opening, parameters, response, result, tools_of, written
from whet_env_nemo_gym.server import Server, Session


class NemoGym:
    """The environment `nemo-gym`. A split is loaded when it is first used."""

    def __init__(self, config: NemoGymConfig) -> None:
        self._config = config
        token = os.environ.get(config.token_variable, "") if config.token_variable else ""
        if config.token_variable and not token:
            raise ConfigError(f"nemo-gym.token_variable: {config.token_variable} is not set, or empty; set it")
        self._server = Server(config.url, token, config.seconds, config.reply_bytes)
        self._free = asyncio.Semaphore(config.sessions)
        self._splits: dict[str, Sequence[Task]] = {}

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `reward`, the server's. Its components, `turns` and `calls` are only recorded."""
        return {"reward": 1.0, "turns": 0.0, "calls": 0.0, **dict.fromkeys(self._config.components, 0.0)}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raises `DataError` with file and line."""
        if split not in self._splits:
            config = self._config
            file = split_file(config.dataset, split, config.subset, config.max_records)
            named = f"dataset {config.dataset!r}, split {split!r}"
            self._splits[split] = load_tasks(file, named, self._task, config.max_bad_records)
        return self._splits[split]

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
                        Message("tool", self._shown(text), answers=call.id)
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

    def _shown(self, text: str) -> str:
        most = self._config.tool_characters
        if len(text) > most:
            text = f"{text[:most]}\n[{len(text) - most} characters left out]"
        return without_markers(text)

    def _task(self, row: Row) -> Task:
        params = parameters(row.record)
        if unfit := [name for name in names_of(tools_of(params.get("tools"))) if not name.isidentifier()]:
            raise DataError(f"a tool is called {unfit[0]!r:.80}, wanted letters, digits and underscores")
        prompt = opening(self._config.system, params["input"])
        return Task(prompt, {"record": dict(row.record)}, id=str(row.record.get("id") or row.where))
