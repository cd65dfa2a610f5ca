"""A Python tool for one episode: it runs pieces of code one after another, and keeps their variables.

    async with Interpreter(sandbox) as python:
        await python.output("x = 6 * 7")  # ""
        await python.output("x")          # "42\\n"

What ends the program, such as a limit, ends its variables too. The next piece of code starts another program.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from importlib.resources import files
from types import TracebackType
from typing import Final, Self

from whet_sandbox.sandbox import ProgramEnded, Result, Sandbox, Session

_PROGRAM: Final = files("whet_sandbox.inside").joinpath("interpreter.py").read_text()
_LAST_WORDS: Final = 300


class Interpreter:
    """Runs code in a sandbox of its own, which the first piece of code opens. It ends with the block."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._stack = sandbox, AsyncExitStack()
        self._running: Session | None = None
        self._turn = asyncio.Lock()
        self.ended = 0
        """How often a program has ended instead of answering."""

    async def __aenter__(self) -> Self:
        """Return the interpreter."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the sandbox."""
        await self._stack.aclose()

    async def output(self, code: str) -> str:
        """Run code, and return what it wrote and the value of a last expression. Raises `SandboxBroken`.

        The text is the program's, so it is hostile, and as long as its limit allows.
        """
        async with self._turn:
            try:
                if self._running is None:
                    self._running = await self._stack.enter_async_context(self._sandbox.session())
                    await self._running.start(code=_PROGRAM)
                answer = await self._running.ask(json.dumps(code).encode())
                return answer.stdout + answer.stderr
            except ProgramEnded as error:
                await self._stack.aclose()
                self._running = None
                self.ended += 1
                return f"{error.result.stdout}[Python has ended: {described(error.result)}. All variables are lost.]"


def described(result: Result) -> str:
    """Return how a program ended, in words, with its last words."""
    ends = {
        "exit": f"it left with code {result.exit}",
        "signal": f"it was ended by signal {-result.exit}",
        "cpu": "it used up its processor time",
        "wall": "it did not answer in time",
        "memory": "it used more memory than it may",
        "output": "it wrote more output than it may",
        "answer": "its answer is longer than it may be",
    }
    words = result.stderr.strip()[-_LAST_WORDS:]
    return ends.get(result.why, result.why) + (f": {words!r}" if words else "")
