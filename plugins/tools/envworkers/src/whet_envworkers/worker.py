"""One environment in a worker process: it plays the episodes that the driver begins.

Episodes are tasks of the worker's event loop. An environment whose code blocks the loop plays one episode at a time in
each process; more processes play more.
"""

import asyncio
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from whet.component import Spec
from whet.config.build import build
from whet.data.messages import Conversation
from whet.data.records import Episode, Task
from whet.errors import EpisodeError
from whet.interfaces.environment import (
    Adaptive,
    EpisodeInfo,
    GroupRewarding,
    check_weights,
    checked_rewards,
    stated_answer,
    states_answers,
)
from whet.interfaces.state import has_state
from whet.interfaces.undecided import noted
from whet.interfaces.workers import WorkerRank
from whet.rollout.fail_fast import ungrouped
from whet_envworkers.messages import Message, failure
from whet_envworkers.model import Playing, RemoteModel, RemoteRole


class EnvironmentWorker:
    """The environment of one process. Public methods are called by `RemoteEnvironment`."""

    def __init__(self, rank: WorkerRank, spec: Spec, name: str, roles: Sequence[str], memory_bytes: int) -> None:
        if memory_bytes:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            least = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
            resource.setrlimit(resource.RLIMIT_AS, (least, hard))
        self._name = name
        asked = [{role: RemoteRole(role) for role in roles}] if roles else []
        self._environment: Any = build(spec, *asked)
        self._tasks: dict[str, Sequence[Task]] = {}
        self._playing: dict[int, tuple[Playing, asyncio.Task[None]]] = {}

    def about(self) -> dict[str, Any]:
        """Return what the driver must know of the environment."""
        environment = self._environment
        check_weights(environment.reward_weights)
        return {
            "weights": self._weights(),
            "answers": states_answers(environment),
            "groups": isinstance(environment, GroupRewarding),
            "keeps": _kept(environment),
        }

    def count(self, split: str) -> dict[str, Any]:
        """Return the number of tasks of a split."""
        return _told(lambda: len(self._of(split)))

    def task(self, split: str, index: int) -> dict[str, Any]:
        """Return a task of a split."""
        return _told(lambda: self._of(split)[index])

    def final_answer(self, messages: Conversation) -> dict[str, Any]:
        """Return the final answer of an episode."""
        return _told(lambda: stated_answer(self._environment, tuple(messages)))

    async def begin(
        self, number: int, alive_seconds: float, task: Task, info: Mapping[str, Any]
    ) -> AsyncIterator[list[Message]]:
        """Play an episode, and yield its messages as they are made.

        Yield an empty list where there are none for `alive_seconds`.
        """
        playing = Playing()
        model = RemoteModel(playing, EpisodeInfo(**info))

        async def run() -> Any:
            return checked_rewards(await self._environment.run(task, model), self._name)

        async with aclosing(self._messages(number, playing, run, alive_seconds)) as found:
            async for messages in found:
                yield messages

    async def begin_group(
        self, number: int, alive_seconds: float, task: Task, episodes: Sequence[Episode]
    ) -> AsyncIterator[list[Message]]:
        """Compare the episodes of a group, and yield the messages as `begin` does."""

        async def run() -> Any:
            given = await self._environment.group_rewards(task, tuple(episodes))
            if not isinstance(given, Sequence):
                raise EpisodeError(f"group_rewards gave {given!r:.60}, wanted a sequence")
            return [checked_rewards(one, self._name) for one in given]

        async with aclosing(self._messages(number, Playing(), run, alive_seconds)) as found:
            async for messages in found:
                yield messages

    async def answer(self, number: int, asked: int, answer: Mapping[str, Any]) -> None:
        """Pass an answer to an episode, unless it has ended."""
        if number in self._playing:
            self._playing[number][0].answer(asked, answer)

    async def cancel(self, number: int) -> None:
        """End an episode whose result is not needed any more."""
        playing = self._playing.get(number)
        if playing is not None:
            _give_up(*playing)
            await asyncio.gather(playing[1], return_exceptions=True)
            self._playing.pop(number, None)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _of(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, which an environment may make or load whenever it is asked."""
        if split not in self._tasks:
            self._tasks[split] = self._environment.tasks(split)
        return self._tasks[split]

    def _weights(self) -> dict[str, float]:
        return {str.__str__(name): float(weight) for name, weight in self._environment.reward_weights.items()}

    async def _messages(
        self, number: int, playing: Playing, run: Callable[[], Awaitable[Any]], alive_seconds: float
    ) -> AsyncGenerator[list[Message], None]:
        """Play an episode in a task of its own, and yield its messages up to its end. Closing this cancels the task."""

        async def play() -> None:
            with noted() as notes, playing.current():
                try:
                    with ungrouped():
                        end: Message = {"rewards": await run(), "weights": self._weights()}
                except BaseException as error:  # SystemExit would end the event loop of all episodes
                    own = asyncio.current_task()
                    if isinstance(error, asyncio.CancelledError) and own is not None and own.cancelling():
                        raise
                    end = {"failed": failure(error)}
            playing.tell("end", notes=list(notes), **end)
            playing.over = True

        task = asyncio.get_running_loop().create_task(play())
        self._playing[number] = playing, task
        task.add_done_callback(lambda _: playing.changed.set())
        try:
            while playing.messages or not task.done():
                playing.changed.clear()
                if not (playing.messages or await _set_within(playing.changed, alive_seconds)):
                    yield []
                if playing.messages:
                    yield playing.taken()
        finally:
            _give_up(playing, task)
            if task.done():
                self._playing.pop(number, None)


def _give_up(playing: Playing, task: "asyncio.Task[None]") -> None:
    """Cancel an episode, unless it was: a second time would interrupt what it does at its end."""
    if not playing.given_up:
        playing.given_up = True
        task.cancel()


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, and return whether it was set in time."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def _kept(environment: Any) -> str:
    """Return what an environment keeps from episode to episode, as text. Empty: nothing."""
    if isinstance(environment, Adaptive):
        return "a curriculum (`difficulty`, `adapted`, `observe`)"
    return "a state (`state` and `load`)" if has_state(environment, "the environment") else ""


def _told(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": function()}
    except Exception as error:
        return {"failed": failure(error)}
