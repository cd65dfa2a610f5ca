"""Restarts after worker processes die or hang, as often as the budgets of a run allow. Each restart is reported.

    a replica of a generator   only this replica; others take its requests      cluster.recovery.replicas
    any other worker           the whole run, from its last checkpoint          cluster.recovery.restarts

An exception that a worker raises ends the run at once: it is a bug or a wrong config, and would be raised again.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from attrs import define

from whet.errors import WorkerLost
from whet.run.run_folder import RunFolder

if TYPE_CHECKING:
    from whet.config.sections import RecoverySection
    from whet.interfaces.workers import Give


@define(eq=False)
class Replicas:
    """Replaces the lost replicas of one attempt of a run. Obeys `whet.interfaces.workers.Replacing`."""

    losses: Counter[str]
    grant: Callable[[WorkerLost], bool]
    sync: "Callable[[Give], None]"


class Budget:
    """The restarts that are left. Each `refill` steps that were never finished before add one."""

    def __init__(self, size: int, refill: int) -> None:
        self._size, self._refill = size, refill
        self._spent: list[int] = []
        """The furthest step at the time of each restart."""

    def spend(self, furthest: int) -> int | None:
        """Take one restart, and return how many are left. None: there was none."""
        if self._refill:
            self._spent = [step for step in self._spent if furthest - step < self._refill]
        if len(self._spent) >= self._size:
            return None
        self._spent.append(furthest)
        return self._size - len(self._spent)


class Recovery:
    """Grants restarts over all run attempts of one `whet run`. May be used from any thread."""

    def __init__(self, section: "RecoverySection", folder: RunFolder) -> None:
        self.enabled = section.enabled
        self._folder = folder
        self._replicas, self._runs = (Budget(n, section.refill) for n in (section.replicas, section.restarts))
        self._lock = threading.Lock()
        self._furthest = 0
        self.losses = Counter[str]()
        """See `whet.interfaces.workers.Replacing`."""

    def finished(self, step: int) -> None:
        """Record a finished step, which may refill the budgets."""
        self._furthest = max(self._furthest, step)

    def grant(self, error: WorkerLost) -> bool:
        """Return whether a replica may be restarted after this; see `whet.interfaces.workers.Replacing`."""
        return self._grant(self._replicas, error, "replica restarted", "it is restarted by itself")

    def replacing(self, resync: "Callable[[Give], None] | None" = None) -> Replicas | None:
        """Return an object that replaces lost replicas; None: recovery is off.

        Replicas get their weights by `resync`. Without it they keep their own.
        """
        sync = resync or (lambda give: give(None))
        return Replicas(self.losses, self.grant, sync) if self.enabled else None

    def grant_run(self, error: WorkerLost, after_step: int) -> bool:
        """Return whether the run may begin again after its last checkpoint."""
        return self._grant(self._runs, error, "run restarted", f"the run goes on after step {after_step}")

    def _grant(self, budget: Budget, error: WorkerLost, event: str, outcome: str) -> bool:
        with self._lock:
            left = budget.spend(self._furthest) if self.enabled else None
        if left is None:
            return False
        who = error.role if error.rank is None else f"{error.role} rank {error.rank}"
        self._folder.journal(
            event, role=error.role, rank=error.rank, phase=error.phase, cause=error.cause[:500], left=left
        )
        with suppress(OSError):  # the program that reads stderr may be gone
            print(f"{who} was lost in {error.phase}: {error.cause}; {outcome} ({left} more allowed)", file=sys.stderr)
        return True
