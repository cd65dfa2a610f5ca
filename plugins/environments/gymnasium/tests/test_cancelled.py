"""A game that is cancelled leaves its process to the other games in it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

from whet.data.records import Task
from whet_env_gymnasium.config import GymnasiumConfig
from whet_env_gymnasium.environment import Gymnasium, _Game
from whet_sandbox.served import Served
from whet_testing.fakes import FakeModel


class Process:
    """Answers as the program in the sandbox does, each time after a moment."""

    def __init__(self, hangs: bool) -> None:
        self.games, self.acted, self.hangs = set[str](), asyncio.Event(), hangs

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
            self.acted.set()
            await asyncio.sleep(30.0 if self.hangs else 0.05)
            answer = {"text": "acted"} if question["act"] in self.games else {"lost": True}
        return SimpleNamespace(line=json.dumps(answer))


class Box:
    """A sandbox that makes these processes."""

    def __init__(self, hangs: bool = False) -> None:
        self.made: list[Process] = []
        self._hangs = hangs

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Process]:
        self.made.append(Process(self._hangs))
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


def test_a_game_that_is_cancelled_does_not_wait_for_a_step_that_hangs(monkeypatch) -> None:
    box = Box(hangs=True)
    served = Served(box, "", {"setup": 1})  # type: ignore[arg-type]
    monkeypatch.setattr("whet_env_gymnasium.environment._served", lambda config: served)
    environment = Gymnasium(GymnasiumConfig("made-up"))
    environment._actions = SimpleNamespace(read=lambda text: 0)  # type: ignore[assignment]

    async def cancelled() -> None:
        task = Task("?", {"seed": 0, "observation": "begun"})
        playing = asyncio.create_task(environment.run(task, FakeModel("a")))
        while not (box.made and box.made[0].acted.is_set()):
            await asyncio.sleep(0.01)
        playing.cancel()
        async with asyncio.timeout(10.0):
            with suppress(asyncio.CancelledError):
                await playing

    try:
        asyncio.run(cancelled())
    finally:
        environment.close()
