"""An environment that shows what happens in the process that plays it, and misbehaves as its tasks say."""

import asyncio
import json
import os
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from attrs import field, frozen

from whet import hookimpl
from whet.component import Component, EnvironmentFacts
from whet.data.messages import Message
from whet.data.records import Task
from whet.errors import DataError, InfrastructureError, Undecided
from whet.interfaces.clock import stopped_clock
from whet.interfaces.undecided import note

KINDS = (
    "plain", "forks", "raises", "undecided", "infrastructure", "dies", "hangs", "blocks", "tidies", "eats", "exits",
    "group", "agent", "judged", "cancels", "impatient", "beside", "waits", "threaded", "late",
    "grades", "swallows",
)  # fmt: skip


@frozen
class ApartConfig:
    """Ten tasks for each kind of behaviour."""

    folder: str = ""
    """Where a task of the kinds `dies`, `hangs`, `blocks` and `tidies` leaves a file. The first two behave the
    second time. Empty: never."""
    kinds: list[str] = field(factory=lambda: list(KINDS))
    """The kinds of tasks."""


class Apart:
    def __init__(self, config, roles=None):
        self._config, self._roles, self._more = config, roles or {}, {}
        folder = Path(config.folder or "/nowhere")
        if (folder / "slow").exists():
            (folder / "building").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)

    def tasks(self, split):
        if split not in ("train", "test"):
            raise DataError(f"there is no split {split!r}; there are train, test")
        return [Task(f"{kind} {i}", {"kind": kind}, id=f"{kind}-{i}") for kind in self._config.kinds for i in range(10)]

    @property
    def reward_weights(self):
        return {"right": 1.0, "process": 0.0, **self._more}

    async def run(self, task, model):
        reply = await model.reply(task.prompt)
        rewards = {"right": float(reply.text == task.prompt[-1].text[::-1]), "process": float(os.getpid())}
        await getattr(self, "_" + task.data["kind"])(task, model)
        return rewards

    def final_answer(self, messages):
        return messages[-1].text or None

    async def group_rewards(self, task, episodes):
        if "metric" in self._config.kinds:
            self._more["first"] = 0.5
        return [{"first": float(i == 0)} for i, _ in enumerate(episodes)]

    def close(self):
        pass

    async def _plain(self, task, model):
        model.reward("step", 0.5)
        model.record("seen", [1, 2])

    async def _metric(self, task, model):
        self._more["steps"] = 0.0
        model.reward("steps", 100.0)

    async def _forks(self, task, model):
        tool = json.dumps({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}})
        model.record("calls", len((await model.with_tools((tool,)).reply("look")).calls))
        await asyncio.gather(*(one.reply(Message("user", "go on")) for one in (model.fork("a"), model.fork("b"))))

    async def _raises(self, task, model):
        raise KeyError("no such key")

    async def _undecided(self, task, model):
        note("it is too long")
        raise Undecided("it is too long")

    async def _infrastructure(self, task, model):
        raise InfrastructureError("its server is away")

    async def _dies(self, task, model):
        if self._first(task):
            os.abort()

    async def _hangs(self, task, model):
        hangs = self._first(task)
        while hangs:
            time.sleep(1)

    async def _blocks(self, task, model):
        self._first(task)
        while not (Path(self._config.folder) / "go").exists():
            time.sleep(0.05)

    async def _tidies(self, task, model):
        try:
            await model.reply("for ever")
        finally:
            await asyncio.sleep(0.2)
            self._first(task)

    async def _swallows(self, task, model):
        with suppress(asyncio.CancelledError):
            await model.reply("for ever")
        try:
            await model.reply("again")
        finally:
            self._first(task)

    async def _eats(self, task, model):
        bytearray(8 << 30)

    async def _exits(self, task, model):
        raise SystemExit(3)

    async def _late(self, task, model):
        """The second episode lets the grader of the first one go on, and records what becomes of it."""
        if task.id == "late-0":
            self._go = asyncio.Event()

            async def grade():
                await self._go.wait()
                model.reward("quality", 1.0)

            self._grader = asyncio.create_task(grade())
        else:
            self._go.set()
            (found,) = await asyncio.gather(self._grader, return_exceptions=True)
            model.record("found", str(found))

    async def _cancels(self, task, model):
        raise asyncio.CancelledError

    async def _group(self, task, model):
        async with asyncio.TaskGroup() as group:
            group.create_task(self._infrastructure(task, model))

    async def _agent(self, task, model):
        async with model.endpoint() as address:
            body = {"model": address.model, "messages": [{"role": "user", "content": "hello"}]}
            asked = urllib.request.Request(
                f"{address.base_url}/chat/completions", json.dumps(body).encode(),
                {"Authorization": f"Bearer {address.api_key}", "Content-Type": "application/json"},
            )  # fmt: skip
            await asyncio.to_thread(lambda: urllib.request.urlopen(asked, timeout=30).read())
        (said,) = (c for c in address.conversations() if c[0].text == "hello")
        model.record("agent", ", ".join(f"{message.role}: {message.text}" for message in said))

    async def _impatient(self, task, model):
        with suppress(TimeoutError):
            await asyncio.wait_for(model.reply("slowly"), 0.05)
        await model.reply("now")

    async def _beside(self, task, model):
        asking = asyncio.create_task(model.reply("slowly"))
        await asyncio.sleep(0.2)
        model.reward("early", 1.0)
        other = model.fork("other")
        await other.reply("now")
        await asking

    async def _grades(self, task, model):
        """Keep the loop busy until the driver has the reply, of which this process then knows nothing."""
        folder = Path(self._config.folder)
        asking = asyncio.create_task(model.reply("slowly"))
        while not (folder / "asked").exists():
            await asyncio.sleep(0.01)
        (folder / "busy").touch()
        while not (folder / "replied").exists():
            time.sleep(0.01)
        model.reward("early", 1.0)
        other = model.fork("other")
        await asking
        await other.reply("now")

    async def _waits(self, task, model):
        with stopped_clock():
            await model.reply("meanwhile")

    async def _threaded(self, task, model):
        reply = await asyncio.to_thread(asyncio.run, model.reply("from a thread"))
        model.record("said", reply.text)

    async def _judged(self, task, model):
        verdict = await self._roles["judge"].reply("good?", seed=7, max_tokens=5)
        model.record("verdict", verdict.text)

    def _first(self, task):
        mark = Path(self._config.folder or "/nowhere") / task.id
        if mark.exists():
            return False
        if self._config.folder:
            mark.touch()
        return True


def facts(config, model):
    return EnvironmentFacts(states_answers=True, splits=("train", "test"))


@hookimpl
def whet_environments():
    return [Component("apart", ApartConfig, f"{__name__}:Apart", f"{__name__}:facts")]
