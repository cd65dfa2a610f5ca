"""A call of each of several ranks, on its way through leaders or to the ranks themselves."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attrs import define, field

from whet.errors import WorkerError
from whet.runtime.call import Call
from whet.runtime.channel import Framed
from whet.runtime.connection import Connection
from whet.runtime.futures import Answers


@define(eq=False)
class EachAsking:
    """Such a call. A rank that has been asked already does it once, and answers whoever asked."""

    role: str
    number: int
    phase: str
    seconds: float
    """Until the deadline, from when a rank was asked directly."""
    answers: Answers
    message: Framed
    """For a rank that is asked directly."""
    began: float = field(factory=time.monotonic, init=False)

    @property
    def halfway(self) -> float:
        """When those are asked directly that have not answered: nobody is late because its leader is."""
        return self.began + self.seconds / 2

    def directly(self, connections: Mapping[int, Connection]) -> None:
        """Ask these ranks over their own connections. From now on they have all the time that there is for it."""
        for rank, connection in connections.items():
            connection.ask(self.number, self.message, self.call(rank, connection, self.answers.finish))

    def call(self, rank: int, connection: Connection, finish: Callable[[int, Any, WorkerError | None], None]) -> Call:
        """Give the share of one rank. Who is late is ended alone."""
        done = partial(finish, rank)
        call = Call(self.role, rank, self.phase, self.seconds, done, missed=connection.kill)
        call.began = self.began
        return call


@define(eq=False)
class PassedOn:
    """The share of a branch."""

    asking: EachAsking
    missing: set[int]
    """Ranks whose answers are not there."""
