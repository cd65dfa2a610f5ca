"""The program of a process that hosts tools. It exchanges JSON with the driver, one object per line.

    driver -> {"path": [...], "memory_bytes": N, "functions": [...] or "server": {...}}
    host   -> {"tools": [{"name", "description", "parameters", "waits"}]}         or {"broken": why}
    driver -> {"id": 1, "tool": "f", "arguments": {...}, "episode": {...}, "seconds": 30}
    host   -> {"id": 1, "text": "...", "error": false, "state": {...}}            or {"id": 1, "late": true}
                                                                                  or {"id": 1, "broken": why}
    driver -> {"cancel": 1}

All calls that the driver has sent run at the same time. `late` means that a call was not over in time. `broken` means
that this process or its server can answer no further call, and must be replaced.
"""

import asyncio
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final, Protocol

from whet.errors import in_words
from whet.runtime.watchdog import die_with, leave_signals_to_driver
from whet_env_tools.hosted.answer import Answer

LONGEST_LINE: Final = 1 << 24
_MOST_TEXT: Final = 1 << 20
"""Most characters of an answer that leave this process."""


class Tools(Protocol):
    """The tools of one process."""

    def described(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of each tool."""

    async def call(self, tool: str, arguments: dict[str, Any], episode: dict[str, Any]) -> Answer:
        """Call a tool. Raises `Broken`."""

    async def recovers(self, seconds: float) -> bool:
        """Return whether further calls can be answered, after a call that was not over within `seconds`."""


def main() -> None:
    """Serve the driver until it is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    leave_signals_to_driver()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    sys.argv = ["whet-tools", sys.argv[3]]
    asyncio.run(_serve(socket.socket(fileno=descriptor)))
    os._exit(0)  # a thread in which a function hangs would keep the process


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)

    async def say(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message, ensure_ascii=True).encode() + b"\n")
        await writer.drain()

    order = json.loads(await reader.readline())
    sys.path[:] = order["path"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = order["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    async with AsyncExitStack() as stack:
        try:
            tools = await _opened(order, stack)
        except Exception as error:  # raised by the user's own module or server
            await say({"broken": in_words(_first(error))})
            return
        await say({"tools": tools.described()})
        running = dict[int, asyncio.Task[None]]()
        while line := await reader.readline():
            message = json.loads(line)
            if "cancel" in message:
                if task := running.get(message["cancel"]):
                    task.cancel()
                continue
            number = message["id"]
            task = asyncio.create_task(_answer(tools, message, say))
            running[number] = task
            task.add_done_callback(lambda _, number=number: running.pop(number, None))  # type: ignore[misc]
        os._exit(0)  # the driver is gone, so nothing waits for running calls


async def _opened(order: dict[str, Any], stack: AsyncExitStack) -> Tools:
    if "functions" in order:
        opened = importlib.import_module("whet_env_tools.hosted.functions").Functions(order["functions"])
    else:
        module = importlib.import_module("whet_env_tools.hosted.mcp_client")
        opened = await stack.enter_async_context(module.connected(order["server"]))
    tools: Tools = opened
    return tools


async def _answer(tools: Tools, message: dict[str, Any], say: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    number = message["id"]
    try:
        try:
            async with asyncio.timeout(message["seconds"]):
                answer = await tools.call(message["tool"], message["arguments"], message["episode"])
        except TimeoutError:
            recovers = await tools.recovers(message["seconds"])
            await say({"id": number, "late": True, **({} if recovers else {"broken": "it does not answer"})})
            return
        text, left_out = answer.text[:_MOST_TEXT], len(answer.text) - _MOST_TEXT
        text += f"\n[{left_out} characters left out]" * (left_out > 0)
        await say({"id": number, "text": text, "error": answer.error, "state": answer.state})
    except asyncio.CancelledError:
        raise
    except MemoryError:  # it is unknown what holds the memory, so the process ends
        os._exit(70)
    except Exception as error:
        await say({"id": number, "broken": in_words(_first(error))})


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main()
