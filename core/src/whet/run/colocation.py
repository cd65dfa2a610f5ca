"""Turns of colocated roles: where roles share memory, training and generation take turns in it.

    take, evaluate, probe       generation's turn    the backend sleeps; the generator is awake, and requests pass
    train, score, save, ...     training's turn      no request passes, the generator sleeps; the backend is awake
    a weight sync               training's turn      of training only the sender is awake, and a backend may free what
                                                     it does not send; the generator wakes for weights only

The thread that drives a run begins each turn. A request waits for its turn at a gate. An environment that asks a
further model waits on its own thread. A turn ends after all requests and calls under way are answered.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal

from attrs import define, field

from whet.data.metrics import Metric, largest
from whet.data.spans import Spans
from whet.errors import WhetError
from whet.rollout.gate import Gate
from whet.run.handles import Around, AroundRequest

if TYPE_CHECKING:
    from whet.interfaces.backend import Backend
    from whet.interfaces.generator import Generator
    from whet.rollout.event_loop import EpisodeLoop

TRAINING: Final = 0
GENERATION: Final = 1


@define(eq=False)
class Turns:
    """The turns of colocated roles during one run attempt. Without sides no role sleeps."""

    sides: Sequence[Sequence[str]]
    """Roles that have their turn together: the roles of training, the roles of generation."""
    spans: Spans
    loop: "EpisodeLoop"
    """The loop on which requests are made."""
    gate: Gate = field(factory=Gate, init=False)
    """The gate that requests pass."""
    _handles: "dict[str, Backend | Generator]" = field(factory=dict, init=False)
    _states: "dict[str, Literal['awake', 'weights', 'asleep']]" = field(factory=dict, init=False)
    """`weights`: a generator that received new weights while it slept, and has taken back nothing else."""
    _turn: int | None = field(default=None, init=False)
    _driver: int = field(factory=threading.get_ident, init=False)
    """The thread that drives the run."""
    _asking: int = field(default=0, init=False)
    """Calls under way that other threads make in generation's turn."""
    _closed: bool = field(default=False, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _given_back: dict[str, int] = field(factory=dict, init=False)

    def join(self, role: str, handle: "Backend | Generator", *, lends: bool = False) -> None:
        """Put a role to sleep right after its start, so that the next role to start finds the memory free.

        A role that `lends` its weights stays awake until its turn ends: the next role to start needs them.
        """
        if self._side(role) is not None:
            self._handles[role], self._states[role] = handle, "awake"
            if not lends:
                self._sleep(role)

    def training(self) -> None:
        """Begin the turn of the roles that train, after all requests under way are answered."""
        self._begin(TRAINING)

    def syncing(self) -> None:
        """Begin a weight sync: training's turn, in which all its roles but the backend sleep."""
        self._begin(TRAINING, "backend")

    def generation(self) -> None:
        """Begin the turn of the roles that generate, and open the gate to requests."""
        self._begin(GENERATION)
        if self.sides:
            self.loop.call(self.gate.open)

    def probing(self) -> None:
        """Begin the turn of the roles that generate, for requests that do not come through the gate."""
        self._begin(GENERATION)

    def around(self, role: str) -> tuple[Around, ...]:
        """Return a context manager that holds the turn of a role during a call; empty where the role takes no turns."""
        side = self._side(role)
        if side is None:
            return ()
        if side == GENERATION:
            return (lambda method: self._in_generation(),)
        return (lambda method: self._in_training(role if method == "send_weights" else ""),)

    def requests(self) -> tuple[AroundRequest, ...]:
        """Return the gate at which requests wait for the generator's turn; empty where it takes no turns."""
        return (lambda: self.gate,) if self.sides else ()

    def took_weights(self, role: str) -> None:
        """Remember that a generator holds weights, if it slept."""
        if self._states.get(role) == "asleep":
            self._states[role] = "weights"

    def close(self) -> None:
        """Wake all threads that wait for a turn, because no further turn comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def metrics(self) -> dict[str, Metric]:
        """Return the most memory that each role, with all its ranks, freed in one sleep since the last call."""
        given, self._given_back = self._given_back, {}
        return {f"given_back_mib/{role}": largest(count / 2**20) for role, count in given.items()}

    def _side(self, role: str) -> int | None:
        return next((side for side, roles in enumerate(self.sides) if role in roles), None)

    def _begin(self, turn: int, only: str = "") -> None:
        """Begin a turn, after the other has ended. With `only`, no other role of its side is awake."""
        if not self.sides:
            return
        awake = [role for role in self.sides[turn] if only in ("", role)]
        asleep = [role for side in (1 - turn, turn) for role in self.sides[side] if role not in awake]
        wanted = dict.fromkeys(awake, "awake") | dict.fromkeys(asleep, "asleep")
        if self._turn == turn and wanted == self._states:
            return
        with self._changed:
            self._turn = None
            if turn == TRAINING:
                with self.spans.phase("generator", "drain"):
                    self.loop.run(self.gate.shut())
            self._changed.wait_for(lambda: not self._asking)
            for role in asleep:
                if self._states[role] != "asleep":
                    self._sleep(role)
            for role in awake:
                if self._states[role] != "awake":
                    self._wake(role)
            self._turn = turn
            self._changed.notify_all()

    def _sleep(self, role: str) -> None:
        with self.spans.phase(role, "sleep"):
            given = self._handles[role].sleep()
        self._states[role] = "asleep"
        if given is not None:
            self._given_back[role] = max(given, self._given_back.get(role, 0))

    def _wake(self, role: str) -> None:
        with self.spans.phase(role, "wake"):
            self._handles[role].wake()
        self._states[role] = "awake"

    @contextmanager
    def _in_training(self, sender: str = "") -> Iterator[None]:
        """Begin the turn of training. During a weight sync all its roles but the `sender` sleep."""
        self._begin(TRAINING, sender)
        yield

    @contextmanager
    def _in_generation(self) -> Iterator[None]:
        if threading.get_ident() == self._driver:
            self._begin(GENERATION)
        with self._changed:
            self._changed.wait_for(lambda: self._turn == GENERATION or self._closed)
            if self._turn != GENERATION:
                raise WhetError("the run ended before the turn of the requested model")
            self._asking += 1
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()
