"""Starts roles: at the same time, except that roles which share processes or a device start one after the other."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.plan.placement import RolePlan, connected, gpus_of
from whet.plan.roles import Roles
from whet.plugins.launchers import LOCAL, launching
from whet.runtime.interpreters import located

if TYPE_CHECKING:
    from whet.config.cluster import ClusterSection
    from whet.interfaces.workers import WorkerGroup
    from whet.runtime.launcher import Cluster


@frozen
class WorkerGroups:
    """Where roles get their workers."""

    of: "Callable[[str], WorkerGroup]"
    """(role) -> its worker group."""
    cluster: "Cluster | None" = None
    """None: the workers live in this process."""


def make_worker_groups(
    section: "ClusterSection", name: str, places: Sequence[RolePlan], roles: Roles, logs: Path,
    closers: list[Callable[[], None]],
) -> WorkerGroups:  # fmt: skip
    """Start the processes of the roles at `places`; they import while the driver prepares. `name` is the run's.

    A launcher is imported only if it is used. Slow work begins in the background.
    """
    if section.workers == "inline":
        from whet.runtime.inline import InlineWorkerGroup

        at = {place.role: place for place in places}
        return WorkerGroups(lambda role: InlineWorkerGroup(role, threads=at[role].threads, device=at[role].devices[0]))
    shared = dict.fromkeys(place.processes for place in places)
    groups = [[place.role for place in places if place.processes == name] for name in shared]
    python = {role: str(located(named)) for role, named in section.python.items()}
    if section.launcher == LOCAL:
        from whet.runtime.local import LocalCluster

        cluster: Cluster = LocalCluster(logs, section.deadlines, groups, python=python)
    else:
        cluster = launching(section.launcher).cluster(section, name, logs, groups, python)
    closers.append(cluster.close)
    worker_groups = {r.role: cluster.worker_group(r.role, r.ranks, r.threads, r.devices) for r in places}
    facts = {role: roles[role].facts for role in worker_groups}
    forkable = [role for role, found in facts.items() if found.forkable]
    cluster.warm({role: found.imports for role, found in facts.items()}, forkable)
    return WorkerGroups(worker_groups.__getitem__, cluster)


def build_groups(places: Iterable[RolePlan]) -> list[list[str]]:
    """Group roles by what they share, directly or through others; in the order of the first of each group."""
    return connected(
        (place.role, (place.processes, *(gpu for device in place.devices for gpu in gpus_of(device))))
        for place in places
    )


def start_roles(
    roles: Sequence[str], groups: Sequence[Sequence[str]], build: Callable[[str], Any],
    closers: list[Callable[[], None]],
) -> dict[str, Any]:  # fmt: skip
    """Build roles and return their handles. If several fail, the error of the first in the order of `roles` is raised.

    Roles of one group are built one after the other: the first group in this thread, each other one in its own.
    """
    first, *others = groups
    made = {role: Future[Any]() for role in roles}

    def build_all(group: Sequence[str]) -> None:
        """Build one role after the other, until one fails."""
        for at, role in enumerate(group):
            try:
                made[role].set_result(build(role))
            except BaseException as error:
                for left in group[at:]:
                    made[left].set_exception(error)
                if not isinstance(error, Exception):  # Ctrl-C does not wait for other roles
                    raise
                return

    try:
        for group in others:
            threading.Thread(target=build_all, args=(group,), name="whet-build", daemon=True).start()
        build_all(first)
        return {role: made[role].result() for role in roles}
    finally:
        built = [one.result() for one in made.values() if one.done() and one.exception() is None]
        closers += [handle.close for handle in built]
