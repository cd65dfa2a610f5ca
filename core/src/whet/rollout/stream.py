"""The rollout stream: admits groups of episodes, plays them, and hands them over in order of admission.

    admitted     0 1 2 3 4 5 6 7 8 9          a position in this order is a position in the data
    outcome      k k f k k d k . k .          kept, filtered, dropped (failed), still playing
                 |-- take --| |-- waiting for 7

One rule paces it, whatever the staleness. With n groups to a take, a group is admitted only while

    groups kept or still playing, not handed over  <  n x (max_staleness + 1 while a take waits)

so at most `max_staleness` takes are in preparation beyond the one that is waited for. A group admitted under
version v is therefore among the next 1 + max_staleness takes, and since weights change at most once between two
takes, it is at most `max_staleness` versions old when it is trained on. Nothing is ever thrown away for age.

    max_staleness 0    take 1 |##### play #####|  train  | take 2 |##### play #####|  train
    max_staleness 1    take 1 |##### play #####|  train  | take 2 | train  | take 3
                              |   play ahead for take 2  |  play ahead for take 3 |

At staleness 0 nothing plays between takes, and groups to replace filtered ones are admitted only when all others
are through. So what the generator is asked together does not depend on timing, and a run repeats bit by bit.

Environments are chosen and tasks drawn by integers (see `routing`), so the state of the stream is a count of
groups for each environment, up to the first that was not handed over: a resumed run plays those again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from whet.data.batch import Batch
from whet.data.records import Group, Sampling
from whet.errors import CheckpointError, WhetError, WorkerError, in_words
from whet.metrics import Metric, largest, total
from whet.rollout.collate import collate, rollout_metrics
from whet.rollout.episode import Assignment, Chat, Player, with_stop_tokens
from whet.rollout.loop import EpisodeLoop
from whet.rollout.routing import Route, choose, shuffled

if TYPE_CHECKING:
    from whet.config.sections import RolloutSection
    from whet.interfaces.generator import Generator

Filter = Callable[[Group], bool]
"""Says whether a group is kept."""


@define(eq=False)
class Slot:
    """One admitted group."""

    index: int
    route: int
    task: int
    outcome: Literal["playing", "kept", "filtered", "dropped"] = "playing"
    group: Group | None = None
    """When kept."""
    tally: Counter[str] = field(factory=Counter)
    """Its episodes by how they ended."""

    @property
    def counts(self) -> bool:
        """Whether it is, or may become, one of the groups that a take gives."""
        return self.outcome in ("playing", "kept")


class RolloutStream:
    """Gives batches of groups that passed the filters. Its methods are for one thread, usually the driver's main."""

    def __init__(
        self,
        routes: Sequence[Route],
        generator: "Generator",
        chat: Chat,
        section: "RolloutSection",
        *,
        group_size: int,
        seed: int,
        filters: Sequence[Filter] = (),
        deadline_seconds: float = 3600.0,
        status: Callable[[str], None] = lambda text: None,
        loop: EpisodeLoop | None = None,
    ) -> None:
        """Make a stream; it plays nothing before the first take.

        `section.max_context` 0 sets no limit, so resolve it to the model's. A stream that is given a loop leaves it
        open when it is closed.
        """
        self._routes, self._section, self._filters, self._status = tuple(routes), section, tuple(filters), status
        self._weights = [route.weight for route in routes]
        if not any(weight > 0 for weight in self._weights):
            raise WhetError(f"of {len(self._weights)} environments none has a weight above 0; raise one's `weight`")
        self._tasks = [route.tasks() for route in routes]
        self._group_size, self._seed = group_size, seed
        self._player = Player(
            generator=generator,
            chat=chat,
            sampling=with_stop_tokens(
                Sampling(section.max_tokens, section.temperature, stop=tuple(section.stop)), chat
            ),
            max_context=section.max_context,
            seed=seed,
            purpose="sample",
            retries=section.retries,
            deadline_seconds=deadline_seconds,
        )
        self.loop, self._own_loop = loop or EpisodeLoop(), loop is None
        # From here on everything is read and written on the loop's thread only.
        self._admitted = [0] * len(self._routes)  # per environment, over the whole run
        self._slots: list[Slot] = []  # admitted and not handed over, in order
        self._running: dict[int, asyncio.Task[None]] = {}
        self._size = 0  # of a take
        self._taking = False
        self._version = 0
        self._in_a_row: Counter[str] = Counter()
        self._tally: Counter[str] = Counter()
        self._fatal: BaseException | None = None
        self._changed = asyncio.Event()
        self._metrics: dict[str, Metric] = {}
        self.last_groups: tuple[Group, ...] = ()
        """The groups of the last take."""

    def take(self, groups: int) -> Batch:
        """Wait for this many groups that pass the filters, and give them as a batch, in order of admission.

        Raises `WorkerError` when a worker failed, and `WhetError` when groups fail or are filtered too often in a row.
        """
        try:
            taken = self.loop.run(self._take(groups), tick=self._report)
        finally:
            self._status("")
        self.last_groups = taken
        self._metrics = {**rollout_metrics(taken), **self.loop.call(self._drain, taken)}
        return collate(taken, self._section.temperature, [route.name for route in self._routes])

    def metrics(self) -> dict[str, Metric]:
        """Give the metrics of the last take, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def set_version(self, version: int) -> None:
        """Say which version the trained weights have now; call it after each hand-over to the generator."""
        self.loop.call(self._set_version, version)

    def state(self) -> dict[str, Any]:
        """Give the position in the data as builtins: groups of each environment before the next to be handed over."""
        return {"groups": self.loop.call(self._position)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Only before the first take."""
        groups, names = dict(state["groups"]), [route.name for route in self._routes]
        if set(groups) != set(names):
            raise CheckpointError(
                f"the checkpoint was made with the environments {', '.join(groups)}, the config has "
                f"{', '.join(names)}; continue with the same environments or start a new run"
            )
        if self._size:
            raise WhetError("a stream that has given batches cannot be restored; restore it before the first take")
        self._admitted = [int(groups[name]) for name in names]

    def close(self) -> None:
        """Cancel all episodes. Safe to call twice."""
        self._fatal = self._fatal or WhetError("the rollout stream is closed")
        if self._own_loop:
            self.loop.close()
        else:
            self.loop.try_run(self._cancel())

    async def _take(self, size: int) -> tuple[Group, ...]:
        if size < 1 or (self._size not in (0, size) and self._section.max_staleness):
            raise ValueError(
                f"take({size}) after take({self._size}): wanted at least 1, and with staleness always the same"
            )
        self._size, self._taking = size, True
        try:
            while True:
                if self._fatal is not None:
                    raise self._fatal
                if len(ready := self._ready()) >= size:
                    break
                self._admit()
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._taking = False
        last = ready[size - 1].index
        self._slots = [slot for slot in self._slots if slot.index > last]
        self._admit()
        return tuple(slot.group for slot in ready[:size] if slot.group is not None)

    def _ready(self) -> list[Slot]:
        """Kept groups before the first one that is still playing."""
        through = takewhile(lambda slot: slot.outcome != "playing", self._slots)
        return [slot for slot in through if slot.outcome == "kept"]

    def _admit(self) -> None:
        """Admit as many groups as the rule allows."""
        staleness = self._section.max_staleness
        if self._fatal is not None or (staleness == 0 and self._running):
            return
        for _ in range(self._size * (staleness + self._taking) - sum(slot.counts for slot in self._slots)):
            slot = self._next_slot()
            self._slots.append(slot)
            self._running[slot.index] = asyncio.get_running_loop().create_task(self._play(slot))

    def _next_slot(self) -> Slot:
        index, route = sum(self._admitted), choose(self._weights, self._admitted)
        name, position = self._routes[route].name, self._admitted[route]
        self._admitted[route] += 1
        return Slot(index, route, shuffled(self._seed, f"tasks of {name}", position, len(self._tasks[route])))

    async def _play(self, slot: Slot) -> None:
        try:
            task = self._tasks[slot.route][slot.task]
            assignment = Assignment(self._routes[slot.route], task, slot.task, slot.index, tally=slot.tally)
            self._settle(slot, await self._player.group(assignment, self._group_size))
        except WorkerError as error:
            self._fail(error)
        except Exception as error:
            self._drop(slot, error)
        finally:
            self._running.pop(slot.index, None)
            self._tally.update(slot.tally)
            self._admit()
            self._changed.set()

    def _settle(self, slot: Slot, group: Group) -> None:
        try:
            kept = all(keep(group) for keep in self._filters)
        except Exception as error:
            self._fail(WhetError(f"a filter failed on task {group.task} of {group.environment!r}: {error!r}"), error)
            return
        self._in_a_row["dropped"] = 0
        if kept:
            slot.outcome, slot.group = "kept", group
            self._in_a_row["filtered"] = 0
            return
        slot.outcome = "filtered"
        limit = self._section.max_filtered_groups or 20 * self._size
        if self._again("filtered") >= limit:
            self._fail(
                WhetError(
                    f"filters dropped {limit} groups in a row, the last (environment {group.environment!r}, task "
                    f"{group.task}) with the rewards {group.rewards.tolist()!r:.200}. The tasks may be too easy or too "
                    "hard for the model; change the tasks or the filters, or raise rollout.max_filtered_groups"
                )
            )

    def _drop(self, slot: Slot, error: Exception) -> None:
        slot.outcome = "dropped"
        if self._again("dropped") >= self._section.max_failed_groups:
            where = f"environment {self._routes[slot.route].name!r}, task {slot.task}"
            said = str(error) if where in str(error) else f"{where}: {in_words(error)}"
            self._fail(WhetError(f"{self._in_a_row['dropped']} groups in a row failed; the last: {said}"), error)

    def _again(self, outcome: str) -> int:
        self._tally[outcome] += 1
        self._in_a_row[outcome] += 1
        return self._in_a_row[outcome]

    def _fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """End the stream: whoever takes next gets the first error."""
        if self._fatal is None:
            error.__cause__ = error.__cause__ or cause
            self._fatal = error
        for task in self._running.values():
            if task is not asyncio.current_task():
                task.cancel()
        self._changed.set()

    def _set_version(self, version: int) -> None:
        self._version = version

    def _position(self) -> dict[str, int]:
        waiting = Counter(slot.route for slot in self._slots)
        return {route.name: self._admitted[i] - waiting[i] for i, route in enumerate(self._routes)}

    def _drain(self, taken: Sequence[Group]) -> dict[str, Metric]:
        """Count what happened since the last take, and check the age of what is handed over."""
        oldest = [oldest_version(group) for group in taken]
        staleness = max(0, *(self._version - version for version in oldest))
        if staleness > self._section.max_staleness:
            raise WhetError(
                f"a group is {staleness} versions old at its hand-over, wanted at most {self._section.max_staleness} "
                f"(rollout.max_staleness); weights may be handed over once between two takes"
            )
        tally = Counter(self._tally)
        self._tally.clear()
        return {
            "groups/dropped": total(tally["dropped"]),
            "groups/filtered": total(tally["filtered"]),
            "episodes/failed": total(tally["failed"]),
            "episodes/retried": total(tally["retried"]),
            "staleness/max": largest(staleness),
        }

    def _report(self) -> None:
        self._status(f"generator {self.loop.call(self._share_done):.0%}".replace("%", " %"))

    def _share_done(self) -> float:
        """Share of the episodes of the take that is waited for which are over."""
        slots = [slot for slot in self._slots if slot.counts][: self._size]
        return sum(slot.tally["done"] for slot in slots) / max(1, self._size * self._group_size)

    async def _cancel(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=1.0)


def oldest_version(group: Group) -> int:
    """Give the oldest version of the weights among the group's trained tokens."""
    return min(int(t.versions[t.loss_mask].min()) for episode in group.episodes for t in episode.trajectories)
