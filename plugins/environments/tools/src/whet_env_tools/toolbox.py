"""All tools of an environment: functions, search, Python and MCP servers, behind one call."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol

from attrs import define, evolve, field, frozen

from whet.data.records import Task
from whet.errors import ConfigError
from whet.interfaces.environment import EpisodeInfo
from whet_env_tools.config import McpConfig, PythonConfig, SearchConfig, ToolUseConfig
from whet_env_tools.processes import Hosts, Order, Outcome, ToolThread
from whet_env_tools.search import Index, as_answer, index_of
from whet_sandbox.gate import Gate
from whet_sandbox.interpreter import Interpreter
from whet_sandbox.open import open_sandbox
from whet_sandbox.sandbox import Sandbox

_NAME: Final = re.compile(r"[\w-]{1,64}", re.ASCII)
_FUNCTIONS_START: Final = 120.0


@define(eq=False)
class Playing:
    """What the tools keep for one episode."""

    stack: AsyncExitStack
    """Ends with the episode."""
    episode: dict[str, Any]
    """The data about the episode that functions get, and their state."""
    turn: asyncio.Lock = field(factory=asyncio.Lock)
    """Held by calls that change the state."""
    opening: asyncio.Lock = field(factory=asyncio.Lock)
    """Held while something is opened for the episode."""
    opened: dict[str, Any] = field(factory=dict)
    """Interpreters and connections that the episode has opened, by name of the source."""


class Source(Protocol):
    """The origin of some tools, such as an MCP server."""

    async def call(self, tool: str, arguments: Mapping[str, Any], playing: Playing) -> Outcome:
        """Call a tool. Raises `InfrastructureError` where the tool itself is broken."""

    def close(self) -> None:
        """End all that runs for the tools."""


@frozen
class Tool:
    """A tool, as the model and the environment know it."""

    name: str
    """The name that the model uses."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    source: Source = field(repr=False)
    within: str = ""
    """Its name within the source."""

    @property
    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates and models read it."""
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}


class Toolbox:
    """The tools of a config. Its processes and servers are started when it is made, to learn their tools."""

    def __init__(self, config: ToolUseConfig) -> None:
        """Start all that has tools. Raises `ToolsBroken`, `ConfigError` or `DataError`, which name the wrong part."""
        self._thread = ToolThread() if config.functions or config.mcp else None
        self._sources = list[Source]()
        try:
            self.tools = {tool.name: tool for tool in _named_once(self._opened(config))}
        except BaseException:
            self.close()
            raise

    @asynccontextmanager
    async def playing(self, task: Task, info: EpisodeInfo) -> AsyncIterator[Playing]:
        """Begin an episode. What it opens ends with the block."""
        episode = {"data": dict(task.data.get("record", {})), "seed": info.seed, "split": info.split, "state": {}}
        async with AsyncExitStack() as stack:
            yield Playing(stack, episode)

    async def call(self, name: str, arguments: Mapping[str, Any], playing: Playing) -> Outcome:
        """Call a tool by the name that the model wrote."""
        tool = self.tools.get(name)
        if tool is None:
            return Outcome(f"There is no tool {name!r:.80}. There are: {', '.join(self.tools)}", error=True)
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            return Outcome(f"Wrong arguments: {error!s:.200}", error=True)
        return await tool.source.call(tool.within or name, arguments, playing)

    def close(self) -> None:
        """End all processes, servers and sandboxes. A second call does nothing."""
        sources, self._sources = self._sources, []
        for source in sources:
            source.close()
        if self._thread is not None:
            self._thread.close()

    def _opened(self, config: ToolUseConfig) -> list[Tool]:
        found = list[Tool]()
        if config.functions:
            assert self._thread is not None
            functions = _Functions(config, self._thread)
            self._sources.append(functions)
            found += functions.tools()
        if config.search is not None:
            search = _Search(config.search)
            self._sources.append(search)
            query = {"query": {"type": "string", "description": "What to search for, in words."}}
            found.append(Tool(config.search.name, config.search.description, _object(query), search))
        if config.python is not None:
            python = _Python(config.python)
            self._sources.append(python)
            code = {"code": {"type": "string", "description": "The code."}}
            found.append(Tool(config.python.name, config.python.description, _object(code), python))
        for name, server in config.mcp.items():
            assert self._thread is not None
            mcp = _Mcp(name, server, self._thread)
            self._sources.append(mcp)
            found += mcp.tools()
        if not found:
            raise ConfigError("the environment has no tool; name some under functions, search, python or mcp")
        return found


class _Functions:
    """The user's functions. Async functions share one process. Others have several, with one call at a time in each."""

    def __init__(self, config: ToolUseConfig, thread: ToolThread) -> None:
        order = Order(
            "functions", {"functions": list(config.functions)}, _FUNCTIONS_START, config.call_seconds,
            config.memory_mib << 20,
        )  # fmt: skip
        self._thread = thread
        self._working = Hosts(order, config.processes)
        self._waiting = Hosts(evolve(order, name="async functions"), at_once=config.waiting_calls)
        self._described: dict[str, dict[str, Any]] = {}

    def tools(self) -> list[Tool]:
        described = self._thread.run(self._working.tools)
        self._described = {tool["name"]: tool for tool in described}
        return [Tool(tool["name"], tool["description"], tool["parameters"], self) for tool in described]

    async def call(self, tool: str, arguments: Mapping[str, Any], playing: Playing) -> Outcome:
        described = self._described[tool]
        hosts = self._waiting if described["waits"] else self._working
        if not described["keeps"]:
            stateless = {**playing.episode, "data": {}, "state": {}}
            return await _called(self._thread, hosts, tool, arguments, stateless)
        async with playing.turn:
            outcome = await _called(self._thread, hosts, tool, arguments, playing.episode)
            if outcome.state is not None:
                playing.episode["state"] = dict(outcome.state)
            return outcome

    def close(self) -> None:
        for hosts in (self._working, self._waiting):
            self._thread.run(hosts.close)


class _Search:
    def __init__(self, config: SearchConfig) -> None:
        self._config, self._index = config, index_of(config.corpus, config.text, config.title)

    async def call(self, tool: str, arguments: Mapping[str, Any], playing: Playing) -> Outcome:
        query = arguments.get("query")
        if not isinstance(query, str) or len(arguments) != 1:
            return Outcome('Wrong arguments: wanted {"query": text}', error=True)
        index: Index = self._index
        found = await asyncio.to_thread(index.search, query, self._config.results)
        return Outcome(as_answer(found, self._config.passage_characters))

    def close(self) -> None: ...


class _Python:
    def __init__(self, config: PythonConfig) -> None:
        self._name = config.name
        self._sandbox: Sandbox = open_sandbox(config.sandbox, config.limits, at_once=config.sessions)

    async def call(self, tool: str, arguments: Mapping[str, Any], playing: Playing) -> Outcome:
        code = arguments.get("code")
        if not isinstance(code, str) or len(arguments) != 1:
            return Outcome('Wrong arguments: wanted {"code": text}', error=True)
        if "python" not in playing.opened:
            interpreter = Interpreter(self._sandbox)
            playing.opened["python"] = interpreter
            playing.stack.push_async_exit(interpreter)
        interpreter = playing.opened["python"]
        before = interpreter.ended
        text = await interpreter.output(code)
        return Outcome(text, failed=interpreter.ended > before)

    def close(self) -> None:
        self._sandbox.close()


class _Mcp:
    """An MCP server, shared by all episodes, or one for each."""

    def __init__(self, name: str, config: McpConfig, thread: ToolThread) -> None:
        server = {
            "command": list(config.command), "url": config.url, "token_variable": config.token_variable,
            "variables": list(config.variables), "folder": config.folder or None,
            "start_seconds": config.start_seconds,
        }  # fmt: skip
        self._name, self._config, self._thread = name, config, thread
        self._order = Order(
            f"the MCP server {name!r}", {"server": server}, config.start_seconds, config.call_seconds,
            config.memory_mib << 20,
        )  # fmt: skip
        self._shared = Hosts(self._order, at_once=config.at_once)
        self._gate, self._own = Gate(config.at_once), set[Hosts]()

    def tools(self) -> list[Tool]:
        described = self._thread.run(self._shared.tools)
        names = [tool["name"] for tool in described]
        if missing := [name for name in self._config.only if name not in names]:
            raise ConfigError(
                f"the MCP server {self._name!r} has no tool {missing[0]!r}, which `only` names; "
                f"it has {', '.join(names)}"
            )
        if self._config.each_episode:
            self._thread.run(self._shared.close)
        return [
            Tool(self._config.prefix + tool["name"], tool["description"], tool["parameters"], self, tool["name"])
            for tool in described
            if not self._config.only or tool["name"] in self._config.only
        ]

    async def call(self, tool: str, arguments: Mapping[str, Any], playing: Playing) -> Outcome:
        hosts = await self._of_episode(playing) if self._config.each_episode else self._shared
        return await _called(self._thread, hosts, tool, arguments, {"seed": playing.episode["seed"]})

    async def _of_episode(self, playing: Playing) -> Hosts:
        """Return the connection of an episode, which its first call opens."""
        key = f"mcp {self._name}"
        async with playing.opening:
            if key not in playing.opened:
                await playing.stack.enter_async_context(self._gate.place())
                hosts = Hosts(self._order, at_once=self._config.at_once, remembers=True)
                self._own.add(hosts)
                playing.stack.push_async_callback(self._end, hosts)
                playing.opened[key] = hosts
        found: Hosts = playing.opened[key]
        return found

    async def _end(self, hosts: Hosts) -> None:
        await self._thread.call(hosts.close)
        self._own.discard(hosts)

    def close(self) -> None:
        for hosts in (self._shared, *self._own):
            self._thread.run(hosts.close)


async def _called(
    thread: ToolThread, hosts: Hosts, tool: str, arguments: Mapping[str, Any], episode: Mapping[str, Any]
) -> Outcome:
    async with hosts.free.place():
        return await thread.call(lambda: hosts.call(tool, arguments, episode))


def _named_once(tools: list[Tool]) -> list[Tool]:
    """Return tools whose names models can use, each once. Raises `ConfigError`."""
    seen = set[str]()
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise ConfigError(f"a tool has the name {tool.name!r:.80}, wanted letters, digits, - and _")
        if tool.name in seen:
            raise ConfigError(f"two tools have the name {tool.name!r}; rename one, e.g. with `prefix` of an MCP server")
        seen.add(tool.name)
    return tools


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": dict(properties), "required": list(properties), "additionalProperties": False
    }  # fmt: skip
