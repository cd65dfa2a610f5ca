"""Start roles: at the same time, but those that share processes or a device one after the other."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from whet.plan.placement import RolePlan


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
        """Give what there is by now."""
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
