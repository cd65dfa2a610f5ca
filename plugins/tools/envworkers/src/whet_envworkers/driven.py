"""What an episode in a worker process asks of the driver: its sequences, endpoints and roles."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from whet.errors import ContextFull, EpisodeError
from whet.interfaces.clock import RUNNING
from whet.interfaces.environment import Address, Model
from whet_envworkers.messages import Message, failure


class Driven:
    """What an episode in a process asks of the driver: its sequences, endpoints, roles and clock."""

    def __init__(
        self, model: Model | None, roles: Mapping[str, Any], answer: Callable[[int, Mapping[str, Any]], None]
    ) -> None:
        """`answer` sends the process the answer to a message, and does not wait."""
        self._sequences = {} if model is None else {0: model}
        self._roles, self._answer, self._clock = roles, answer, RUNNING.get()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the error that ends the episode, once there is one."""
        self._open: dict[str, _Endpoint] = {}
        self._asked: dict[asyncio.Task[None], int] = {}
        self._replied = set[int]()
        self._keys = itertools.count(1)

    async def __aenter__(self) -> "Driven":
        return self

    async def __aexit__(self, *error: Any) -> None:
        tasks = [*self._asked, *(endpoint.task for endpoint in self._open.values())]
        self._asked.clear()
        for task in tasks:
            task.cancel()
        self.failed.cancel()
        await asyncio.gather(*tasks, self.failed, return_exceptions=True)

    async def take(self, message: Message) -> None:
        """Carry a message out, or begin to."""
        match message["do"]:
            case "fork":
                model: Any = self._of(message)
                self._sequences[message["new"]] = model.fork(message["agent"], **self._seen(message))
            case "tools":
                self._sequences[message["new"]] = self._of(message).with_tools(tuple(message["tools"]))
            case "reward":
                where = message["tokens"]
                tokens = None if where is None else (where[0], where[1])
                model = self._of(message)
                model.reward(
                    message["name"], message["value"], of=message["address"], tokens=tokens, **self._seen(message)
                )
            case "record":
                self._of(message).record(message["name"], message["value"])
            case "stop" if self._clock is not None:
                self._clock.stop()
            case "go" if self._clock is not None:
                self._clock.go()
            case "stop" | "go":
                pass
            case "forget":
                await self._forget(message)
            case "shut" if "id" not in message:
                await self._open.pop(message["key"]).shut()
            case _:
                task = asyncio.ensure_future(self._answered(message))
                self._asked[task] = message["id"]
                task.add_done_callback(self._settle)

    def check(self) -> None:
        """Raise the error with which the model failed at an endpoint, which is the cause of what its agent met."""
        for endpoint in self._open.values():
            if endpoint.task.done() and not endpoint.task.cancelled() and (error := endpoint.task.exception()):
                raise error

    def _settle(self, task: "asyncio.Task[None]") -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self._asked.pop(task, None) is not None and error is not None and not self.failed.done():
            self.failed.set_exception(error)

    def _seen(self, message: Message) -> dict[str, int]:
        """Return the turns of a sequence that the environment had seen, if the reply that it awaited has ended here."""
        model: Any = self._of(message)
        return {"turns": model.turns - 1} if message["awaits"] in self._replied else {}

    async def _forget(self, message: Message) -> None:
        """Take a reply back that the environment does not wait for any more, or that it has not got."""
        for task in [task for task, number in self._asked.items() if number == message["reply"]]:
            del self._asked[task]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if message["reply"] in self._replied:
            model: Any = self._of(message)
            model.forget()

    async def _answered(self, message: Message) -> None:
        try:
            answer = {"value": await self._value(message)}
        except ContextFull as error:  # an environment may go on without a response
            answer = {"failed": failure(error)}
        self._answer(message["id"], answer)

    async def _value(self, message: Message) -> Any:
        match message["do"]:
            case "reply":
                settings = message["settings"]
                reply = await self._of(message).reply(message["messages"], **settings)
                self._replied.add(message["id"])
                return reply
            case "role":
                method = getattr(self._roles[message["name"]], {"value": "value", "reply": "reply"}[message["method"]])
                return await method(message["messages"], **message["settings"])
            case "open":
                endpoint, key = _Endpoint(self._of(message).endpoint(ignore=message["ignore"])), str(next(self._keys))
                self._open[key] = endpoint
                address = await endpoint.address()
                return {
                    "base_url": address.base_url, "api_key": address.api_key, "model": address.model, "key": key,
                }  # fmt: skip
            case "shut":
                endpoint = self._open.pop(message["key"])
                found = (await endpoint.address()).conversations()
                await endpoint.shut()
                return [list(conversation) for conversation in found]
            case unknown:
                raise EpisodeError(f"its process asks for {unknown!r}, which this driver does not know")

    def _of(self, message: Message) -> Model:
        if message["of"] not in self._sequences:
            raise EpisodeError("it asks the model where there is none: the rewards of a group have no episode")
        return self._sequences[message["of"]]


class _Endpoint:
    """An endpoint that is open until `shut`. One task enters and leaves it, because it may cancel the one it is in."""

    def __init__(self, opened: AbstractAsyncContextManager[Address]) -> None:
        self._shut, self._entered = asyncio.Event(), asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] = asyncio.ensure_future(self._host(opened))

    async def address(self) -> Address:
        """Return the address once it is open. Raises the error of an endpoint that cannot be opened."""
        await asyncio.wait([self.task, self._entered], return_when=asyncio.FIRST_COMPLETED)
        if not self._entered.done():
            await self.task
        address: Address = await self._entered
        return address

    async def shut(self) -> None:
        """Close it. Raises the error with which the model failed meanwhile."""
        self._shut.set()
        await self.task

    async def _host(self, opened: AbstractAsyncContextManager[Address]) -> None:
        async with opened as address:
            self._entered.set_result(address)
            await self._shut.wait()
