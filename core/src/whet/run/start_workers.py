"""Start roles: at the same time, but those that share processes or a device one after the other."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.plan.placement import RolePlan
from whet.plan.prepare import Prepared
from whet.run.start_cluster import make_cluster

if TYPE_CHECKING:
    from whet.interfaces.workers import Slice
    from whet.runtime.launcher import Cluster


@frozen
class Slices:
    """Where roles get their workers."""

    of: "Callable[[str], Slice]"
    """(role) -> its slice."""
    cluster: "Cluster | None" = None
    """None: the workers live in this process."""


def make_slices(prepared: Prepared, logs: Path, closers: list[Callable[[], None]], only: Sequence[str] = ()) -> Slices:
    """Start the processes of all roles, or of those alone that are named; they import while the driver prepares."""
    plan = prepared.plan
    if plan.inline:
        from whet.runtime.inline import InlineSlice

        at = plan.role
        return Slices(lambda role: InlineSlice(role, threads=at(role).threads, device=at(role).devices[0]))
    places = [place for place in plan.roles if place.role in only or not only]
    wanted = {place.role for place in places}
    groups = [[role for role in group if role in wanted] for group in prepared.roles.groups]
    cluster = make_cluster(prepared.config, groups, logs)
    closers.append(cluster.close)
    slices = {r.role: cluster.slice(r.role, r.ranks, r.threads, r.devices) for r in places}
    facts = {role: prepared.roles[role].facts for role in slices}
    forkable = [role for role, found in facts.items() if found.forkable]
    cluster.warm({role: found.imports for role, found in facts.items()}, forkable)
    return Slices(slices.__getitem__, cluster)


def lanes(places: Iterable[RolePlan]) -> list[list[str]]:
    """Group roles by what they share, directly or through others; in the order of the first of each group."""
    found: list[tuple[list[str], set[str]]] = []
    for place in places:
        gpus = {gpu for device in place.devices if device != "cpu" for gpu in device.partition(":")[2].split(",")}
        held = {f"process {place.processes}", *(f"GPU {gpu}" for gpu in gpus)}
        meeting = [lane for lane in found if lane[1] & held]
        joined = [role for roles, _ in meeting for role in roles] + [place.role]
        merged = joined, held.union(*(things for _, things in meeting))
        at = found.index(meeting[0]) if meeting else len(found)
        found = [lane for lane in found if lane not in meeting]
        found.insert(at, merged)
    return [roles for roles, _ in found]


class Starting:
    """Roles being built, the first lane in the thread that asks for it and each other one in a thread of its own."""

    def __init__(self, groups: Sequence[Sequence[str]], build: Callable[[str], Any]) -> None:
        self._made = {role: Future[Any]() for roles in groups for role in roles}
        self._groups, self._build = groups, build

    def result(self, roles: Iterable[str]) -> dict[str, Any]:
        """Build and wait. Where several fail, the error is of the first in the order of `roles`."""
        first, *others = self._groups
        for lane in others:
            threading.Thread(target=self._run, args=(lane,), name="whet-start", daemon=True).start()
        self._run(first)
        return {role: self._made[role].result() for role in roles}

    def built(self) -> list[Any]:
        """Return the handles that are built by now."""
        return [made.result() for made in self._made.values() if made.done() and made.exception() is None]

    def _run(self, lane: Sequence[str]) -> None:
        """Build one after the other, until one fails."""
        for at, role in enumerate(lane):
            try:
                self._made[role].set_result(self._build(role))
            except BaseException as error:
                for left in lane[at:]:
                    self._made[left].set_exception(error)
                if not isinstance(error, Exception):  # Ctrl-C waits for nobody
                    raise
                return
