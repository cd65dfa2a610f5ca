"""Whether machines have the memory that a plan takes: pure, from the roles of a plan and what the machines have.

What is predicted is the least: activations, and what processes and libraries take for themselves, are not. So what is
refused could not have run.

    ranks -> machines and their GPUs (`place_ranks`) -> what each of these must hold (`rooms`) -> what is too much
"""

from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve, frozen

from whet.component import MemoryTerm, Problem
from whet.config.cluster import ClusterSection
from whet.plan.placement import Machine, RolePlan, gpus_of
from whet.plan.rank_placement import RankPlacement, place_ranks
from whet.plan.roles import Roles

KEY = "cluster.memory"
HOST = "the host"
_ASLEEP = ", asleep"
_SHOWN = 3
"""Terms that a message names: the largest."""


@frozen
class Room:
    """The memory of a machine's host or of one of its GPUs, and what the plan puts there."""

    place: str
    """E.g. `GPU 0` or `the host`."""
    node: int
    """Index of the machine."""
    has: int | None
    """Bytes; None: not known."""
    needs: int
    """Bytes at least, at the worst moment."""
    terms: tuple[tuple[str, int], ...] = ()
    """The parts of that need, the largest first: words and bytes."""
    changes: tuple[str, ...] = ()
    """The changes that reduce the need; the first one concerns the largest part."""

    @property
    def overfull(self) -> bool:
        """Return whether it is known to have less than is needed."""
        return self.has is not None and self.needs > self.has


def rooms(
    cluster: ClusterSection, table: Roles, roles: Sequence[RolePlan], turns: Sequence[Sequence[str]], machine: Machine
) -> list[Room]:  # fmt: skip
    """Return what every host and GPU must hold at the least. Empty if the place of the ranks is not known."""
    placed = place_ranks(cluster, table, roles, machine)
    found = list[Room]()
    for number, node in enumerate(machine.nodes):
        here = [one for one in placed if one.node == number]
        on_gpus = {gpu: [one for one in here if gpu in one.gpus] for one in here for gpu in one.gpus}
        for gpu, living in sorted(on_gpus.items()):
            has = node.gpu_bytes[gpu] if gpu < len(node.gpu_bytes) else None
            on_gpu = [(one.role.role, term) for one in living for term in _of_gpu(one, has)]
            found.append(_room(on_gpu, turns, f"GPU {gpu}", number, has))
        on_host = [(one.role.role, term) for one in here for term in _of_host(one, turns)]
        if on_host:
            found.append(_room(on_host, turns, HOST, number, node.memory_bytes))
    return found


def _of_gpu(one: RankPlacement, has: int | None) -> Iterator[MemoryTerm]:
    """Return what a rank holds on each of its GPUs."""
    there = [evolve(term, bytes=term.bytes // len(one.gpus)) for term in one.role.memory if term.place != "host"]
    for term in there:
        if term.gpu_share and has is not None:
            others = sum(other.bytes for other in there if other.when == "working" and other is not term)
            yield evolve(term, bytes=max(0, int(term.gpu_share * has) - others))
        else:
            yield term


def _of_host(one: RankPlacement, turns: Sequence[Sequence[str]]) -> Iterator[MemoryTerm]:
    """Return what a rank holds in the host's memory: all, or what waits there while its GPU is another's."""
    sleeps = any(one.role.role in side for side in turns)
    for term in one.role.memory:
        if term.place == "host" or (term.place == "" and not one.gpus):
            yield term
        elif one.gpus and sleeps and term.when == "working" and term.kept_asleep and not term.lent:
            yield evolve(term, what=f"{term.what}{_ASLEEP}", place="host")


def memory_problems(
    cluster: ClusterSection, found: Iterable[Room], machine: Machine, table: Roles, roles: Sequence[RolePlan]
) -> list[Problem]:
    """Return what is known not to fit, and what to change: the worst GPU, the worst host, and shares of a GPU."""
    if cluster.memory == "ignore":
        return []
    overfull = sorted((room for room in found if room.overfull), key=lambda room: (room.has or 0) - room.needs)
    worst = {room.place == HOST: room for room in reversed(overfull)}
    return [*(_problem(room, machine) for room in worst.values()), *_small_shares(table, roles, machine)]


def _small_shares(table: Roles, roles: Sequence[RolePlan], machine: Machine) -> Iterator[Problem]:
    """Yield shares of a GPU that weights alone fill, even on the largest GPU that could hold them."""
    has = max((number or 0 for node in machine.nodes for number in node.gpu_bytes), default=0)
    for one in (role for role in roles if role.devices[0] != "cpu"):
        share = sum(term.gpu_share for term in one.memory)
        rest = [t for t in one.memory if t.when == "working" and t.place != "host" and not t.gpu_share]
        least = sum(term.bytes for term in rest) // len(gpus_of(one.devices[0]))
        if share and share * has <= least < has:
            words = f"is {share:g}, {size(share * has)} of a GPU of {size(has)}, and the weights take {size(least)}"
            more = "; ".join(
                [f"raise it above {-(-100 * least // has) / 100:g}", *(t.change for t in rest if t.change)]
            )
            yield Problem(f"{table[one.role].path}.memory_fraction", f"{words}, so there is no cache: {more}")


def size(number: float) -> str:
    """Return a number of bytes in words."""
    return f"{number / 2**20:,.0f} MiB" if number < 2**30 else f"{number / 2**30:,.1f} GiB"


def whose(room: Room, machine: Machine) -> str:
    """Return the machine, or its GPU, that has this memory, as text."""
    where = "the given machine" if machine.given else "this machine"
    if machine.others:
        where = f"machine {room.node + 1} of {len(machine.nodes)}"
    return where if room.place == HOST else f"{room.place} of {where}"


def _problem(room: Room, machine: Machine) -> Problem:
    listed = ", ".join(f"{size(number)} {words}" for words, number in room.terms[:_SHOWN])
    more = sum(number for _, number in room.terms[_SHOWN:])
    listed += f", {size(more)} the rest" if more else ""
    general = "take GPUs with more memory, or a smaller model"
    if room.place == HOST:
        waits = any(words.endswith(_ASLEEP) for words, _ in room.terms)
        less = "take fewer ranks on a machine" if waits else "put roles on GPUs (cluster.gpus)"
        general = f"{less}, a machine with more memory, or a smaller model"
    changes = "; ".join((*dict.fromkeys(room.changes[:2]), general))
    return Problem(
        KEY,
        f"{whose(room, machine)} has {size(room.has or 0)} of memory, and the plan takes at least "
        f"{size(room.needs)} of it: {listed}. What helps: {changes}. `{KEY}: ignore` tries it all the same",
    )


def _room(
    terms: Sequence[tuple[str, MemoryTerm]], turns: Sequence[Sequence[str]], place: str, node: int, has: int | None
) -> Room:
    """Find the worst moment of one memory, from what roles hold there: a role occurs once for each of its ranks."""
    loading = [one for one in terms if one[1].when == "loading"]
    by_role = [[one for one in loading if one[0] == role] for role in dict.fromkeys(role for role, _ in loading)]
    worst = max(map(_sums, [_working(terms, turns), *by_role]), key=lambda sums: sum(sums.values()))
    largest = sorted(worst.items(), key=lambda item: -item[1])
    change = {_words(role, term): term.change for role, term in terms}
    changes = tuple(change[words] for words, _ in largest if change[words])
    return Room(place, node, has, sum(worst.values()), tuple(largest), changes)


def _working(terms: Sequence[tuple[str, MemoryTerm]], turns: Sequence[Sequence[str]]) -> list[tuple[str, MemoryTerm]]:
    """Return the terms that are held at one time. Of roles that take turns, the larger side counts."""
    working = [one for one in terms if one[1].when == "working"]
    changing = {role for side in turns for role in side}
    always = [one for one in working if one[0] not in changing or one[1].place == "host" or one[1].lent]
    sides = [[one for one in working if one[0] in side and one not in always] for side in turns]
    # During a weight sync the backend alone is awake of the roles of training, and generators are for weights.
    sending = [one for side in sides[:1] for one in side if one[0] == "backend" and one[1].kept_asleep]
    syncing = [one for one in sending if one[1].woken] or sending
    syncing += [one for side in sides[1:] for one in side if one[1].woken]
    return [*always, *max([*sides, syncing], key=lambda side: sum(term.bytes for _, term in side))]


def _words(role: str, term: MemoryTerm) -> str:
    return f"{role}: {term.what}"


def _sums(terms: Iterable[tuple[str, MemoryTerm]]) -> dict[str, int]:
    """Add up what is of one kind."""
    found: dict[str, int] = {}
    for role, term in terms:
        found[_words(role, term)] = found.get(_words(role, term), 0) + term.bytes
    return found
