"""The model and the roles of an episode, as an environment in a worker process sees them."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from whet.data import messages as spoken
from whet.data.messages import Conversation
from whet.data.records import Reply, recordable, stops
from whet.errors import DataError, EpisodeError
from whet.interfaces.clock import RUNNING, Clock, on_loop
from whet.interfaces.environment import Address, EpisodeInfo
from whet_envworkers.messages import Message, raised

log = logging.getLogger(__name__)
_CURRENT: ContextVar["Playing"] = ContextVar("whet_playing")


class Playing:
    """The messages of one episode to the driver, in order, and the answers for which it waits."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.awaited: dict[int, int] = {}
        """The reply that a sequence awaits, by the numbers of both."""
        self.changed = asyncio.Event()
        self.over = False
        """Whether the episode has ended: what comes later would be lost."""
        self.given_up = False
        """Whether the episode was cancelled, as the driver does not need it."""
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self.sequences = itertools.count(1)
        """Numbers for further sequences; 0 is the first one."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the episode whose roles answer in this context, and whose clock `stopped_clock` stops."""
        clock = RemoteClock(self)
        token, former = _CURRENT.set(self), RUNNING.set(clock)
        try:
            yield
        finally:
            clock.over = True
            RUNNING.reset(former)
            _CURRENT.reset(token)

    def tell(self, do: str, **values: Any) -> None:
        """Send a message that wants no answer. Raises `EpisodeError` after the episode's end."""
        if self.over:
            words = f"model.{do} after the episode's end has no effect; await its task before `run` returns"
            log.warning(words)
            raise EpisodeError(words)
        self.messages.append({"do": do, **values})
        self._loop.call_soon_threadsafe(self.changed.set)

    async def ask(self, do: str, **values: Any) -> Any:
        """Send a message and return its answer."""
        return await on_loop(self._ask(do, values), self._loop)

    async def _ask(self, do: str, values: Mapping[str, Any]) -> Any:
        if self.given_up:
            raise EpisodeError("it was given up, and goes on although it was cancelled; nobody answers it any more")
        number = next(self._numbers)
        future = self.waiting[number] = asyncio.get_running_loop().create_future()
        if do == "reply":
            self.awaited[values["of"]] = number
        self.tell(do, id=number, **values)
        try:
            return await future
        except asyncio.CancelledError:  # by a time limit of the environment, say
            if do == "reply":
                self.tell("forget", of=values["of"], reply=number)
            raise
        finally:
            self.waiting.pop(number, None)
            if do == "reply":
                self.awaited.pop(values["of"], None)

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Take an answer of the driver."""
        future = self.waiting.pop(number, None)
        if future is None or future.done():
            return
        if "failed" in answer:
            future.set_exception(raised(answer["failed"]))
        else:
            future.set_result(answer["value"])

    def taken(self) -> list[Message]:
        """Return the messages that were not sent yet."""
        messages, self.messages = self.messages, []
        return messages


class RemoteClock(Clock):
    """The clock of an episode's deadline. The driver has the clock itself."""

    def __init__(self, playing: Playing) -> None:
        super().__init__(asyncio.timeout(None), 0.0)
        self._playing = playing

    def stop(self) -> None:
        """See `Clock.stop`."""
        self._playing.tell("stop")

    def go(self) -> None:
        """See `Clock.go`. Does nothing after the episode's end, as its clock is gone."""
        if self.here:
            self._playing.tell("go")


class RemoteModel:
    """One sequence of an episode; see `whet.interfaces.environment.Model`. The driver has the sequence itself."""

    def __init__(self, playing: Playing, episode: EpisodeInfo, number: int = 0) -> None:
        self._playing, self._episode, self._number = playing, episode, number

    @property
    def episode(self) -> EpisodeInfo:
        """See `Model.episode`."""
        return self._episode

    async def reply(
        self, messages: "str | spoken.Message | Sequence[spoken.Message]", *, max_tokens: int | None = None,
        stop: Sequence[str] = (), temperature: float | None = None, prefill: str = "",
    ) -> Reply:  # fmt: skip
        """See `Model.reply`."""
        settings = {"max_tokens": max_tokens, "stop": list(stops(stop)), "temperature": temperature, "prefill": prefill}
        reply: Reply = await self._playing.ask(
            "reply", of=self._number, messages=list(spoken.conversation(messages)), settings=settings
        )
        return reply

    def with_tools(self, tools: spoken.Tools) -> "RemoteModel":
        """See `Model.with_tools`."""
        number = next(self._playing.sequences)
        self._playing.tell("tools", of=self._number, new=number, tools=list(tools))
        return RemoteModel(self._playing, self._episode, number)

    def fork(self, agent: str = "") -> "RemoteModel":
        """See `Model.fork`."""
        number = next(self._playing.sequences)
        awaits = self._playing.awaited.get(self._number)
        self._playing.tell("fork", of=self._number, new=number, agent=agent, awaits=awaits)
        return RemoteModel(self._playing, self._episode, number)

    def reward(
        self, name: str, value: float, *, of: Literal["turn", "sequence", "agent"] = "turn",
        tokens: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """See `Model.reward`. An address that does not exist fails the episode when the driver reads it."""
        where = None if tokens is None else [int(tokens[0]), int(tokens[1])]
        self._playing.tell(
            "reward", of=self._number, name=str(name), value=float(value), address=of, tokens=where,
            awaits=self._playing.awaited.get(self._number),
        )  # fmt: skip

    def record(self, name: str, value: Any) -> None:
        """See `Model.record`."""
        try:
            self._playing.tell("record", of=self._number, name=str(name), value=recordable(value))
        except DataError as error:
            raise EpisodeError(f"it recorded {name!r}: {error}") from error

    def endpoint(self, *, ignore: Collection[str] = ()) -> AbstractAsyncContextManager[Address]:
        """See `Model.endpoint`. The agent reaches the driver's endpoint directly."""
        return self._endpoint(list(ignore))

    @asynccontextmanager
    async def _endpoint(self, ignore: list[str]) -> AsyncIterator[Address]:
        told = await self._playing.ask("open", of=self._number, ignore=ignore)
        seen: list[tuple[Conversation, ...]] = []

        def conversations() -> tuple[Conversation, ...]:
            if not seen:
                raise EpisodeError(
                    "it reads the conversations of an endpoint that is open, which an environment in a worker process "
                    "cannot; read them after `async with model.endpoint()`, or play it without `worker`"
                )
            return seen[0]

        try:
            yield Address(told["base_url"], told["api_key"], told["model"], conversations)
        except BaseException:
            self._playing.tell("shut", key=told["key"])  # nobody answers an episode that is cancelled
            raise
        found = await self._playing.ask("shut", key=told["key"])
        seen.append(tuple(tuple(conversation) for conversation in found))


class RemoteRole:
    """A further model that the driver has: a `Scorer` or a `Responder`; see `whet.interfaces.environment`."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def value(self, messages: "str | spoken.Message | Sequence[spoken.Message]", cut: bool = False) -> float:
        """See `Scorer.value`."""
        return float(await self._ask("value", messages, {"cut": cut}))

    async def reply(
        self, messages: "str | spoken.Message | Sequence[spoken.Message]", *, seed: int,
        max_tokens: int | None = None, stop: Sequence[str] = (), temperature: float | None = None, prefill: str = "",
    ) -> Reply:  # fmt: skip
        """See `Responder.reply`."""
        settings = {
            "seed": seed, "max_tokens": max_tokens, "stop": list(stops(stop)), "temperature": temperature,
            "prefill": prefill,
        }  # fmt: skip
        reply: Reply = await self._ask("reply", messages, settings)
        return reply

    async def _ask(self, method: str, messages: Any, settings: Mapping[str, Any]) -> Any:
        if (playing := _CURRENT.get(None)) is None:
            words = "on a thread that does not know its episode; start the thread by asyncio.to_thread"
            raise EpisodeError(f"it asks the role {self._name!r} {words}")
        conversation = list(spoken.conversation(messages))
        return await playing.ask("role", name=self._name, method=method, messages=conversation, settings=settings)
