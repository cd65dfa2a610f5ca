"""The groups of ranks of one spawn, and the branches through which they are called."""

import threading
from collections.abc import Sequence
from contextlib import suppress

from whet.runtime.branch import Branch
from whet.runtime.call import Terms
from whet.runtime.connection import Connection

_MOST_LEADERS = 4
"""Or nearly: what more there are would cost the driver, larger groups cost each leader."""


class Groups:
    """Where there are many ranks, groups of them. Each is asked one by one until it has been formed, and where it
    cannot be; one that lost a rank, or had one cut off, is formed again.
    """

    def __init__(self, role: str, slot: int, connections: Sequence[Connection], terms: Terms) -> None:
        """Of one spawn; `connections` holds what each rank has at any time."""
        self._role, self._slot, self._connections, self._terms = role, slot, connections, terms
        self._groups: list[list[int]] = []
        self._led: tuple[list[Branch], list[int]] = [], list(range(len(connections)))
        """Branches, and the ranks of none; replaced as one, for calls begin while branches are formed."""
        self._retired: list[Branch] = []
        """Whose place others have taken, until the calls under way are over."""
        self._unformed: list[list[int]] = []
        self._lock, self._forming = threading.Lock(), threading.Lock()
        self._closed = False

    def arrange(self) -> None:
        """Group ranks whose processes have been heard of. They are formed when they are first needed."""
        size = len(self._connections)
        if size > self._terms.fan_out:
            most = max(self._terms.fan_out, -(-size // _MOST_LEADERS))
            self._groups = node_groups([connection.process.node for connection in self._connections], most)
            self._unformed = list(self._groups)

    @property
    def led(self) -> tuple[list[Branch], list[int]]:
        """The branches that there are now, and the ranks of none."""
        return self._led

    def form(self) -> None:
        """Form what is not formed, and wait for it, and for what is being formed in the background."""
        if self._unformed or self._forming.locked():
            self._form()

    def form_soon(self) -> None:
        """Form it in the background: until then its ranks are asked one by one."""
        if self._unformed and not (self._closed or self._forming.locked()):
            with suppress(RuntimeError):  # no thread more: then it stays as it is
                threading.Thread(target=self._form, name="whet-forming", daemon=True).start()

    def renew(self, rank: int) -> None:
        """Have the group of a rank formed anew: that has another process, or is cut off from its leader."""
        with self._lock:
            self._unformed += [ranks for ranks in self._groups if rank in ranks and ranks not in self._unformed]

    def retire(self) -> None:
        """Pass on nothing more."""
        self._closed = True
        for branch in self._led[0]:
            branch.retire()

    def close(self) -> None:
        """What is still under way fails."""
        for branch in [*self._led[0], *self._retired]:
            branch.close()

    def _form(self) -> None:
        with self._forming:
            with self._lock:
                groups, self._unformed = self._unformed, []
            numbers, again = self._terms.numbers, {rank for ranks in groups for rank in ranks}
            for branch in self._led[0]:
                if not again.isdisjoint(branch.ranks):
                    branch.retire()  # what it has sent reaches a leader before that hears of the new branch
            made = [(branch, branch.form(numbers)) for branch in map(self._branch, groups)]
            formed = [branch for branch, future in made if future.result()]
            kept = [branch for branch in self._led[0] if again.isdisjoint(branch.ranks)]
            self._retired += {*self._led[0], *(branch for branch, _ in made)} - {*kept, *formed}
            branches = sorted([*kept, *formed], key=lambda branch: branch.ranks)
            led = {rank for branch in branches for rank in branch.ranks}
            self._led = branches, [rank for rank in range(len(self._connections)) if rank not in led]
            for branch in self._retired:
                branch.retire()
            for branch in [branch for branch in self._retired if branch.idle]:
                branch.close()
                self._retired.remove(branch)
        if self._closed:
            self.close()

    def _branch(self, ranks: Sequence[int]) -> Branch:
        connections = {rank: self._connections[rank] for rank in ranks}
        return Branch(next(self._terms.numbers), self._slot, self._role, connections, self.renew)


def node_groups(nodes: Sequence[str], most: int) -> list[list[int]]:
    """Group ranks, each given by the name of its node: at most so many, those of one node together where it can be."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    groups: list[list[int]] = []
    for ranks in by_node.values():
        if groups and len(groups[-1]) + len(ranks) <= most:
            groups[-1] += ranks
            continue
        parts = -(-len(ranks) // most)
        groups += [ranks[len(ranks) * n // parts : len(ranks) * (n + 1) // parts] for n in range(parts)]
    return [group for group in groups if len(group) > 1]
