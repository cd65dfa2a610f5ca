"""An environment whose episodes are played in worker processes, as the driver of a run sees it.

    rollouts ── run(task, model) ──> RemoteEnvironment ── begin, answer ──> EnvironmentWorker ── run ──> environment
    RecordedModel <── reply, reward, fork ─┘     <── what it asks of the model ──┘

The model, its recorder and the roles stay with the driver. What can go wrong in a process, and what follows:

    the environment raises                       the error of the episode, as if it were played by the driver
    its process dies, or silences its heartbeat  the process is replaced; its episodes fail as infrastructure, which is
                                                 played again and counted (`rollout.infrastructure_retries`).
                                                 Others are played elsewhere meanwhile, or wait
    an episode misses `cluster.deadlines.episode`    it is cancelled; where its process does not obey within
                                                 `CANCEL_SECONDS`, because its code hangs, the process is replaced too
    another episode of its group fails           it is cancelled; its process may first finish what other episodes
                                                 compute, within `cluster.deadlines.episode`
"""

import asyncio
import itertools
import logging
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from whet.config.build import to_spec
from whet.config.cluster import DeadlinesSection
from whet.config.sections import WorkerSection
from whet.data.messages import Conversation
from whet.data.records import Episode, Task
from whet.errors import ConfigError, InfrastructureError, WorkerError, WorkerLost
from whet.interfaces.clock import RUNNING, stopped_clock
from whet.interfaces.environment import Model
from whet.interfaces.undecided import note
from whet.runtime.interpreters import find
from whet.runtime.local import LocalCluster
from whet.runtime.watchdog import watchdog
from whet_data.generated import GeneratedTasks
from whet_envworkers.driven import Driven
from whet_envworkers.messages import Message, raised

if TYPE_CHECKING:
    from whet.config.sections import EnvironmentSection

logger = logging.getLogger(__name__)

WORKER = "whet_envworkers.worker:EnvironmentWorker"
CANCEL_SECONDS = 10.0
"""Time in which a process must end an episode that has missed its deadline."""
ANSWER_SECONDS = 30.0
"""Time in which a process must state the final answer of an episode."""
REPLACED_SECONDS = 0.1
"""Time between two looks whether a process was replaced."""
KEPT_TASKS = 4096


class RemoteEnvironment:
    """An environment in worker processes. Obeys `whet.interfaces.environment.Environment`."""

    final_answer: Callable[[Conversation], str | None]
    group_rewards: Callable[[Task, Sequence[Episode]], Any]

    def __init__(
        self, section: "EnvironmentSection", name: str, deadlines: DeadlinesSection | None = None,
        roles: Mapping[str, Any] | None = None, *, logs: Path | None = None,
    ) -> None:  # fmt: skip
        """Start the processes, and build the environment in each. Raises `WorkerError` where it cannot be built.

        `logs`: folder for what the processes write. None: a temporary one.
        """
        self._name, self._roles = name, dict(roles or {})
        self._deadlines = deadlines or DeadlinesSection()
        worker = section.worker or WorkerSection()
        self._size, self._closed = worker.processes, False
        self._logs, self._temporary = logs or Path(tempfile.mkdtemp(prefix="whet-environment-")), logs is None
        if self._temporary:
            watchdog().guard("folder", str(self._logs))
        role = f"environment-{name}"
        python = {role: str(find(worker.python))} if worker.python else {}
        self._cluster = LocalCluster(self._logs, self._deadlines, python=python)
        try:
            group = self._cluster.worker_group(role, self._size)
            memory = int(worker.memory_gib * (1 << 30))
            arguments = {
                "spec": to_spec(section.component), "name": name, "roles": list(self._roles), "memory_bytes": memory,
            }  # fmt: skip
            self._workers = group.spawn(WORKER, arguments)
            (about, *_) = self._workers.call("about", phase="start")
            if about["keeps"]:
                raise ConfigError(f"it has {about['keeps']}, which processes would not share; remove `worker`")
        except BaseException:
            self.close()
            raise
        self._weights: dict[str, float] = about["weights"]
        if about["answers"]:
            self.final_answer = self._final_answer
        if about["groups"]:
            self.group_rewards = self._group_rewards
        self._locks = [threading.Lock() for _ in range(self._size)]
        self._starts = [0] * self._size
        """How often each process was replaced."""
        self._load = [0] * self._size
        self._numbers = itertools.count(1)
        self._tasks: OrderedDict[tuple[str, int], Task] = OrderedDict()
        self._lengths: dict[str, int] = {}
        self._abandoning: set[asyncio.Task[None]] = set()

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Return the weights that the environment has, and those that it added when it played."""
        return self._weights

    @property
    def replaced(self) -> int:
        """Return how many processes were replaced so far."""
        return sum(self._starts)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, which a process makes when they are needed."""
        if split not in self._lengths:
            self._lengths[split] = int(self._ask("count", split, seconds=self._deadlines.start))
        return GeneratedTasks(self._lengths[split], partial(self._task, split))

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play an episode in a process. Raises what the environment raises; see the module for what else may happen."""
        rewards: Mapping[str, float] = await self._play("begin", model, task, attrs.asdict(model.episode))
        return rewards

    def close(self) -> None:
        """End the processes."""
        if not self._closed:
            self._closed = True
            self._cluster.close()
            if self._temporary:
                shutil.rmtree(self._logs, ignore_errors=True)
                watchdog().release("folder", str(self._logs))

    def _final_answer(self, messages: Conversation) -> str | None:
        answer: str | None = self._ask("final_answer", list(messages), seconds=ANSWER_SECONDS)
        return answer

    async def _group_rewards(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        found: Sequence[Mapping[str, float]] = await self._play("begin_group", None, task, list(episodes))
        return found

    def _task(self, split: str, index: int) -> Task:
        key = (split, index)
        if key not in self._tasks:
            self._tasks[key] = self._ask("task", split, index, seconds=self._deadlines.episode)
            if len(self._tasks) > KEPT_TASKS:
                self._tasks.popitem(last=False)
        return self._tasks[key]

    async def _play(self, method: str, model: Model | None, *args: Any) -> Any:
        """Play what `method` begins in the process that plays the fewest, and return what it ends with.

        Waits while all processes are being replaced.
        """
        while not (ranks := self._ready()):
            with stopped_clock():
                await asyncio.sleep(REPLACED_SECONDS)
        rank, number = min(ranks, key=self._load.__getitem__), next(self._numbers)
        self._load[rank] += 1
        over = False
        try:
            async with Driven(model, self._roles, partial(self._answer, rank, number)) as driven:
                listening = asyncio.ensure_future(self._listen(driven, rank, method, number, *args))
                try:
                    either: list[asyncio.Future[Any]] = [driven.failed, listening]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if driven.failed.done():
                        driven.failed.result()
                    end = listening.result()
                    over = True
                    driven.check()
                    return self._ended(end)
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        finally:
            self._load[rank] -= 1
            if not over:
                self._abandon(rank, number)

    async def _listen(self, driven: Driven, rank: int, method: str, number: int, *args: Any) -> Message:
        """Carry out what an episode in a process asks for, and return the message that it has ended.

        Raises `InfrastructureError` if its process is lost, once it is replaced.
        """
        starts, alive_seconds = self._starts[rank], self._deadlines.episode / 4
        stream = self._workers.stream(rank, method, number, alive_seconds, *args, phase="episode")
        try:
            async with aclosing(cast(AsyncGenerator[list[Message], None], stream)) as heard:
                async for messages in heard:
                    for message in messages:
                        if message["do"] == "end":
                            return message
                        await driven.take(message)
        except WorkerError as error:
            if isinstance(error, WorkerLost):
                await asyncio.to_thread(self._replace, rank, starts, error)
            raise self._infrastructure(error) from error
        raise InfrastructureError(f"environment {self._name!r}: its process does not play the episode any more")

    def _answer(self, rank: int, number: int, asked: int, answer: Mapping[str, Any]) -> None:
        """Send an answer to an episode. If its process is lost, `_listen` meets the loss."""
        limit = self._deadlines.episode
        try:
            self._workers.start_each([rank], "answer", number, asked, answer, phase="episode", timeout_seconds=limit)
        except WorkerError as error:  # the workers are closed
            raise self._infrastructure(error) from error

    def _ended(self, message: Message) -> Any:
        for reason in message["notes"]:
            note(reason)
        if "failed" in message:
            raise raised(message["failed"])
        self._weights = {**self._weights, **message["weights"]}
        return message["rewards"]

    def _abandon(self, rank: int, number: int) -> None:
        """End an episode in its process without waiting for it.

        Before the episode's own deadline, its process may be busy with another episode, which is none of its fault.
        """
        clock = RUNNING.get()
        late = clock is not None and clock.overdue > 0
        seconds = CANCEL_SECONDS if late else self._deadlines.episode
        with suppress(RuntimeError):  # the event loop ends
            task = asyncio.get_running_loop().create_task(self._cancel(rank, number, seconds))
            self._abandoning.add(task)
            task.add_done_callback(self._abandoning.discard)

    async def _cancel(self, rank: int, number: int, seconds: float) -> None:
        """Cancel an episode in its process. A process that does not obey within `seconds` is replaced."""
        loop, starts = asyncio.get_running_loop(), self._starts[rank]
        done = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def heard(error: WorkerError | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle)

        try:
            pending = self._workers.start_each([rank], "cancel", number, phase="episode", timeout_seconds=seconds)
            if pending.when(rank, heard):
                await done
            pending.result(rank)
        except WorkerLost as error:
            await asyncio.to_thread(self._replace, rank, starts, error)
        except WorkerError as error:
            logger.debug(f"environment {self._name!r}: {error}")

    def _ready(self) -> list[int]:
        """Return the ranks whose processes are not being replaced: until it is built, such a one refuses episodes."""
        return [rank for rank, lock in enumerate(self._locks) if not lock.locked()]

    def _ask(self, method: str, *args: Any, seconds: float) -> Any:
        """Call a sync method of the first process and return its result. If its process is lost, call another one."""
        rank = (self._ready() or [0])[0]
        with self._locks[rank]:  # wait while it is being replaced
            starts = self._starts[rank]
        try:
            (told,) = self._workers.start_on(rank, method, *args, phase="episode", timeout_seconds=seconds).result()
        except WorkerLost as error:
            self._replace(rank, starts, error)
            try:
                (told,) = self._workers.start_on(rank, method, *args, phase="episode", timeout_seconds=seconds).result()
            except WorkerError as again:
                raise self._infrastructure(again) from again
        except WorkerError as error:
            raise self._infrastructure(error) from error
        if "failed" in told:
            raise raised(told["failed"])
        return told["value"]

    def _replace(self, rank: int, starts: int, cause: WorkerLost) -> None:
        """Start a process anew, unless that was done since it was replaced `starts` times."""
        with self._locks[rank]:
            if self._closed or self._starts[rank] != starts:
                return
            logger.warning(
                f"environment {self._name!r}: process {rank} was lost and is replaced; its episodes are played again. "
                f"{cause}"
            )
            with suppress(WorkerError):  # the next call meets the loss, and tries again
                self._workers.restart(rank)
            self._starts[rank] += 1

    def _infrastructure(self, error: WorkerError) -> InfrastructureError:
        return InfrastructureError(f"environment {self._name!r}: {error}")
