"""The rollout stream: admits groups of episodes, plays them, and returns the groups that passed the filters.

    admitted     0 1 2 3 4 5 6 7 8 9          a position in this order is a position in the data
    outcome      k k f k k d k . k .          kept, filtered, dropped (failed), still playing
                 |-- take --| |-- waiting for 7        with `order: fifo`
                 |-- take --|     ^ next               with `order: as_completed`

`staleness` decides how many groups are admitted and which ones a take returns. It keeps the bound of staleness.

    max_staleness 0    take 1 |##### play #####|  train  | take 2 |##### play #####|  train
    max_staleness 1    take 1 |##### play #####|  train  | take 2 | train  | take 3
                              |   play ahead for take 2  |  play ahead for take 3 |

At staleness 0 nothing plays between takes, and replacements of filtered groups are admitted only when all other groups
have finished. So the set of concurrent requests does not depend on timing, and a run repeats bit by bit.

A group ends exactly once: trained on, filtered or dropped. A take consumes the groups that it returns, and all groups
that were filtered or dropped until then. A run that resumes after this take plays all other groups again. The
environment and the task of a group are functions of a few integers (see `routing`). So the state of the stream is
small: a count of groups for each environment, up to the first group that was not consumed, and the numbers of the
consumed groups after it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from whet.data.batch import Batch
from whet.data.metrics import Metric, largest, mean, merge, total
from whet.data.records import Group, Sampling
from whet.errors import CheckpointError, PluginError, WhetError, WorkerError, in_words, printable
from whet.interfaces.chat import Chat
from whet.interfaces.endpoint import Endpoints
from whet.interfaces.state import load_states, states
from whet.plugins.endpoints import InstalledEndpoints
from whet.rollout.collate import collate, rollout_metrics
from whet.rollout.curricula import Curricula
from whet.rollout.episode import EpisodeFailed, Player, with_stop_tokens
from whet.rollout.event_loop import EpisodeLoop
from whet.rollout.fail_fast import BrokenEnvironment
from whet.rollout.gate import Gate
from whet.rollout.journal import Consumed
from whet.rollout.recorded import Assignment
from whet.rollout.routing import Route, Shares, shuffled
from whet.rollout.staleness import Pacing, Slot

if TYPE_CHECKING:
    from whet.config.sections import RolloutSection
    from whet.interfaces.generator import Generator

log = logging.getLogger(__name__)

Filter = Callable[[Group], bool]
"""Returns whether a group is kept."""


class RolloutStream:
    """Returns batches of groups that passed the filters. All methods are for one thread, usually the main thread."""

    def __init__(
        self, routes: Sequence[Route], generator: "Generator", chat: Chat, section: "RolloutSection", *,
        group_size: int, seed: int, filters: Sequence[Filter] = (), deadline_seconds: float = 3600.0,
        status: Callable[[str], None] = lambda text: None, loop: EpisodeLoop | None = None,
        endpoints: Endpoints | None = None, greedy: bool = False,
        journal: Callable[..., None] = lambda event, **details: None,
    ) -> None:  # fmt: skip
        """Make a stream. It plays nothing before the first take.

        A `section.max_context` of 0 means no limit, so the caller must replace 0 by the model's limit. A loop that is
        passed in stays open when the stream is closed. `greedy`: each group has one more episode, at temperature 0; see
        `Group.greedy`.
        """
        self._routes, self._section, self._filters, self._status = tuple(routes), section, tuple(filters), status
        load_states(self._stateful(), {})  # refuses what has one of the methods of a state alone
        self._shares = Shares([route.weight for route in routes])
        self._tasks = [route.tasks() for route in routes]
        self._passing = {route.name: route.scoring.passing for route in routes if route.weight}
        self._greedy, self._seed, self._journal = greedy, seed, journal
        self._pacing = Pacing(section.max_staleness, section.order)
        self.gate = Gate()
        """The gate that all requests pass on their way to the generator; see `paused`."""
        usual = Sampling(section.max_tokens, section.temperature, stop=tuple(section.stop))
        self._sampling = {route.name: route.sampling(usual) for route in routes}
        self._sizes = [route.group_size or group_size for route in routes]
        player = Player(
            generator=generator, chat=chat, sampling=usual, max_context=section.max_context, seed=seed,
            purpose="sample", retries=section.retries, deadline_seconds=deadline_seconds,
            infrastructure_retries=section.infrastructure_retries, gate=self.gate,
            endpoints=endpoints or InstalledEndpoints(),
        )  # fmt: skip
        self._players = [evolve(player, sampling=with_stop_tokens(self._sampling[r.name], chat)) for r in routes]
        self.loop, self._own_loop = loop or EpisodeLoop(), loop is None
        # From here on, state is read and written on the loop's thread only.
        self._curricula = Curricula(self._routes, self._fail)
        self._admitted = [0] * len(self._routes)  # per environment, over the whole run
        self._slots: list[Slot] = []  # admitted and not consumed, in order
        self._beyond: dict[int, int] = {}  # index -> route of consumed groups after one that is not
        self._skipped: set[int] = set()  # consumed in an earlier attempt, not yet reached by admission
        self._running: dict[int, asyncio.Task[None]] = {}
        self._size = 0  # groups per take
        self._takes, self._taking = 0, False
        self._through = 0
        self._version = 0
        self._in_a_row: Counter[str] = Counter()
        self._tally: Counter[str] = Counter()
        self._told = set[str]()  # environments whose first dropped group was reported
        self._fatal: BaseException | None = None
        self._changed = asyncio.Event()
        self._metrics: dict[str, Metric] = {}
        self._consumed = Consumed()

    def take(self, groups: int) -> Batch:
        """Wait for `groups` groups that pass the filters, and return them as a batch, in order of admission.

        Raises `WorkerError` when a worker failed, `BrokenEnvironment` when all first episodes of an environment failed
        alike, and `WhetError` when groups fail or are filtered too often in a row.
        """
        try:
            consumed, counted = self.loop.run(self._take(groups), tick=self._report)
        finally:
            self._status("")
        self._consumed = self._consumed + consumed
        self._metrics = merge([self._metrics, rollout_metrics(consumed.trained, self._passing), counted])
        temperatures = {name: one.temperature for name, one in self._sampling.items()}
        weights = {route.name: route.environment.reward_weights for route in self._routes}
        return collate(consumed.trained, temperatures, weights)

    def collect(self) -> Consumed:
        """Return the groups consumed by the takes since the last call, and reset."""
        consumed, self._consumed = self._consumed, Consumed()
        return consumed

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics of the takes since the last call, and reset."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def set_version(self, version: int) -> None:
        """Set the version of the trained weights. Call this after each weight sync to the generator."""
        self.loop.call(setattr, self, "_version", version)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold back all new requests of this stream during the body. The body begins when no request is running.

        Other users of the generator then have it to themselves, so their results do not depend on timing.
        """
        try:
            self.loop.run(self.gate.shut(), tick=lambda: self._tell("rollouts under way to end, before the evaluation"))
            self._status("")
            yield
        finally:
            self.loop.call(self.gate.open)

    def state(self) -> dict[str, Any]:
        """Return the position in the data as builtins.

        `groups`: for each environment, the groups before the first one that was not consumed; `beyond`: consumed groups
        after it; `states`: the states of environments and filters, if they have any.
        """
        return self.loop.call(self._position)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a `state`. Call this before the first take."""
        groups, names = dict(state["groups"]), [route.name for route in self._routes]
        if set(groups) != set(names):
            raise CheckpointError(
                f"the checkpoint was made with the environments {', '.join(groups)}, the config has "
                f"{', '.join(names)}; continue with the same environments or start a new run"
            )
        if self._takes:
            raise WhetError("a stream that has given batches cannot be restored; restore it before the first take")
        self._admitted = [int(groups[name]) for name in names]
        self._skipped = {int(index) for index in state["beyond"]}
        self._shares.restore(state.get("shares", {}), self._admitted)
        load_states(self._stateful(), state.get("states", {}))

    def close(self) -> None:
        """Cancel all episodes. Safe to call twice."""
        self._fatal = self._fatal or WhetError("the rollout stream is closed")
        if self._own_loop:
            self.loop.close()
        else:
            self.loop.try_run(self._cancel())

    async def _take(self, size: int) -> tuple[Consumed, dict[str, Metric]]:
        if size < 1 or (self._size not in (0, size) and self._section.max_staleness):
            raise ValueError(f"take({size}) after take({self._size}): wanted at least 1, and the same with staleness")
        self._size, self._taking = size, True
        try:
            while True:
                if self._fatal is not None:
                    raise self._fatal
                if (chosen := self._pacing.choose(self._slots, size, self._takes + 1)) is not None:
                    break
                self._changed.clear()
                self._admit()
                await self._changed.wait()
        finally:
            self._taking = False
        self._takes += 1
        consumed = self._consume(chosen)
        if self._fatal is not None:  # a curriculum failed to learn from what was consumed
            raise self._fatal
        counted = self._count(consumed)
        self._admit()
        return consumed, counted

    def _consume(self, chosen: Sequence[Slot]) -> Consumed:
        """Remove the chosen groups, and all groups that were filtered or dropped so far, and return them."""
        ended = [slot for slot in self._slots if not slot.counts]
        gone = {slot.index: slot.route for slot in (*chosen, *ended)}
        self._slots = [slot for slot in self._slots if slot.index not in gone]
        self._beyond |= gone
        self._curricula.observe(sorted((*chosen, *ended), key=lambda slot: slot.index))
        return Consumed(
            trained=tuple(slot.group for slot in chosen if slot.group is not None),
            filtered=tuple(slot.index for slot in ended if slot.outcome == "filtered"),
            dropped=tuple(slot.index for slot in ended if slot.outcome == "dropped"),
        )

    def _admit(self) -> None:
        """Admit as many groups as the rules allow."""
        if self._fatal is not None or (self._section.max_staleness == 0 and self._running):
            return
        for _ in range(self._pacing.room(self._slots, self._size, self._taking)):
            if (slot := self._next_slot()) is None:
                return
            self._slots.append(slot)
            self._running[slot.index] = asyncio.get_running_loop().create_task(self._play(slot))

    def _next_slot(self) -> Slot | None:
        """Return the next group; None: the curriculum of its environment failed."""
        while (index := sum(self._admitted)) in self._skipped:
            self._skipped.discard(index)
            self._beyond[index] = self._next_route()
        position = self._admitted.copy()
        route = self._next_route()
        name, tasks = self._routes[route].name, self._tasks[route]
        task = shuffled(self._seed, f"tasks of {name}", position[route], len(tasks))
        due, difficulty = self._pacing.due(self._takes, self._taking), self._curricula.difficulty(route)
        return Slot(index, route, task, due, step=self._version, difficulty=difficulty) if self._fatal is None else None

    def _next_route(self) -> int:
        route = self._shares.next(self._admitted, self._version)
        self._admitted[route] += 1
        return route

    async def _play(self, slot: Slot) -> None:
        try:
            route = self._routes[slot.route]
            task = self._curricula.adapted(slot, route.task(self._tasks[slot.route], slot.task))
            assignment = Assignment(route, task, slot.task, slot.index, slot.step, slot.difficulty, tally=slot.tally)
            player, size = self._players[slot.route], self._sizes[slot.route]
            self._settle(slot, await player.group(assignment, size, self._greedy))
        except (WorkerError, BrokenEnvironment) as error:
            self._fail(error)
        except Exception as error:
            try:
                self._drop(slot, error)
            except WhetError as failure:  # the journal cannot be written
                self._fail(failure, error)
        finally:
            if slot.outcome == "playing" and self._fatal is None:
                where = f"environment {self._routes[slot.route].name!r}, task {slot.task}"
                self._fail(WhetError(f"{where} cancelled the asyncio task that played its group"))
            self._running.pop(slot.index, None)
            self._tally.update(slot.tally)
            self._admit()
            self._changed.set()

    def _settle(self, slot: Slot, group: Group) -> None:
        try:
            kept = all(_keeps(one, group) for one in self._filters)
        except Exception as error:
            words = f"a filter failed on task {group.task} of {group.environment!r}: {in_words(error)}"
            self._fail(WhetError(words), error)
            return
        self._in_a_row["failed"] = self._in_a_row["infrastructure"] = 0
        self._finish(slot)
        slot.group = group
        if kept:
            slot.outcome = "kept"
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

    def _finish(self, slot: Slot) -> None:
        self._through += 1
        slot.finished = self._through

    def _drop(self, slot: Slot, error: Exception) -> None:
        self._finish(slot)
        slot.outcome = "dropped"
        lost = isinstance(error, EpisodeFailed) and error.infrastructure
        limit = self._section.max_infrastructure_groups if lost else self._section.max_failed_groups
        name = self._routes[slot.route].name
        self._journal("group dropped", group=slot.index, environment=name, task=slot.task, cause=in_words(error)[:500])
        if name not in self._told:
            self._told.add(name)
            log.warning("environment %r: a group was dropped, because %s", name, printable(in_words(error)))
        if (count := self._again("infrastructure" if lost else "failed")) >= limit:
            where = f"environment {name!r}, task {slot.task}"
            said = str(error) if where in str(error) else f"{where}: {in_words(error)}"
            why = " because of their infrastructure" if lost else ""
            self._fail(WhetError(f"{count} groups in a row failed{why}; the last: {said}"), error)

    def _again(self, outcome: str) -> int:
        self._in_a_row[outcome] += 1
        return self._in_a_row[outcome]

    def _fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """End the stream: every later take raises the first error."""
        if self._fatal is None:
            error.__cause__ = error.__cause__ or cause
            self._fatal = error
        for task in self._running.values():
            if task is not asyncio.current_task():
                task.cancel()
        self._changed.set()

    def _position(self) -> dict[str, Any]:
        first = min((slot.index for slot in self._slots), default=sum(self._admitted))
        self._beyond = {index: route for index, route in self._beyond.items() if index > first}
        ahead = {**{slot.index: slot.route for slot in self._slots}, **self._beyond}
        counts = Counter(ahead.values())
        groups = {route.name: self._admitted[i] - counts[i] for i, route in enumerate(self._routes)}
        position = {"groups": groups, "beyond": sorted([*self._beyond, *self._skipped])}
        if shares := self._shares.state(first, ahead):
            position["shares"] = shares
        return {**position, "states": found} if (found := states(self._stateful())) else position

    def _stateful(self) -> dict[str, object]:
        """Return the components of the stream that may have a state, by name."""
        filters = {f"filter {i}": one for i, one in enumerate(self._filters)}
        return {**filters, **{f"environment {route.name}": route.environment for route in self._routes}}

    def _count(self, consumed: Consumed) -> dict[str, Metric]:
        """Return the metrics since the last take. Raises `WhetError` if a group is older than `max_staleness`."""
        episodes = [episode for group in consumed.trained for episode in group.episodes]
        trained = [one for episode in episodes for one in episode.trajectories if one.loss_mask.any()]
        ages = [self._version - int(one.versions[one.loss_mask].min()) for one in trained] or [0]
        if max(ages) > self._section.max_staleness:
            raise WhetError(
                f"a group is {max(ages)} versions old when it is taken, wanted at most {self._section.max_staleness} "
                f"(rollout.max_staleness); weights may be synced once between two takes"
            )
        tally = Counter(self._tally)
        self._tally.clear()
        return {
            "groups/dropped": total(len(consumed.dropped)), "groups/filtered": total(len(consumed.filtered)),
            "episodes/failed": total(tally["failed"]), "episodes/infrastructure": total(tally["infrastructure"]),
            "episodes/retried": total(tally["retried"]), "grader/undecided": total(tally["undecided"]),
            "staleness/max": largest(max(0, *ages)), "staleness/mean": mean(sum(ages), len(ages)),
        }  # fmt: skip

    def _report(self) -> None:
        done, wanted = self.loop.call(self._progress)
        self._tell(f"rollouts, {done} of {wanted} episodes finished")

    def _tell(self, words: str) -> None:
        self._status(words)
        self.loop.refuse_overdue(self.gate)

    def _progress(self) -> tuple[int, int]:
        """Return the finished episodes of the waiting take, and the number of all its episodes."""
        done = [slot.tally["done"] for slot in self._slots if slot.counts]
        if self._section.order == "as_completed":
            done.sort(reverse=True)
        sizes = [self._sizes[slot.route] + self._greedy for slot in self._slots if slot.counts]
        return sum(done[: self._size]), sum(sizes[: self._size])

    async def _cancel(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=1.0)


def _keeps(keep: Filter, group: Group) -> bool:
    """Return whether a filter keeps a group. Raise `PluginError` if it returns neither true nor false."""
    found: object = keep(group)
    if not isinstance(found, bool | np.bool_):
        name = getattr(keep, "__qualname__", type(keep).__qualname__)
        raise PluginError(f"the filter `{name}` returned {found!r:.60}, wanted True or False")
    return bool(found)
