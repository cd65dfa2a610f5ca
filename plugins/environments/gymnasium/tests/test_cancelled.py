"""A game that is cancelled leaves its process to the other games in it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

from whet_env_gymnasium.environment import _Game
from whet_sandbox.served import Served


class Process:
    """Answers as the program in the sandbox does, each time after a moment."""

    def __init__(self) -> None:
        self.games, self.acted = set[str](), asyncio.Event()

    async def start(self, code: str, files: Any) -> None:
        pass

    async def ask(self, line: bytes | str, seconds: float) -> Any:
        question = json.loads(line)
        if "setup" in question:
            answer: dict[str, Any] = {}
        elif "begin" in question:
            self.games.add(question["begin"])
            answer = {"text": "begun"}
        else:
            await asyncio.sleep(0.05)
            answer = {"text": "acted"} if question["act"] in self.games else {"lost": True}
        return SimpleNamespace(line=json.dumps(answer))


class Box:
    """A sandbox that makes these processes."""

    def __init__(self) -> None:
        self.made: list[Process] = []

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Process]:
        self.made.append(Process())
        yield self.made[-1]

    def close(self) -> None:
        pass


def test_a_game_that_is_cancelled_leaves_its_process_to_the_others() -> None:
    box = Box()
    served = Served(box, "", {"setup": 1})  # type: ignore[arg-type]

    async def cancelled() -> Any:
        stays, leaves = (_Game(served, key, 0, 30.0) for key in ("stays", "leaves"))
        for game in (stays, leaves):
            await game.ask({"begin": game.key})
        asking = asyncio.create_task(leaves.ask({"act": "leaves"}))
        await asyncio.sleep(0)  # it is under way
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        return await stays.ask({"act": "stays"})

    try:
        assert asyncio.run(cancelled()) == {"text": "acted"}
        assert len(box.made) == 1
    finally:
        served.close()
