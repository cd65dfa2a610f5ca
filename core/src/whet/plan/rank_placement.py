"""On which machine, and on which of its GPUs, each rank lives: pure, from the roles of a plan and the machines."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, field, frozen

from whet.component import Problem
from whet.config.cluster import ClusterSection
from whet.plan.placement import Machine, RolePlan, connected, gpus_of, joins
from whet.plan.roles import Roles

_NO_MACHINE: Final = -1


@frozen
class RankPlacement:
    """Where one rank of a role lives."""

    role: RolePlan
    rank: int
    node: int
    """Index of its machine."""
    gpus: tuple[int, ...]
    """The GPUs of the machine that it computes on; empty: it computes on the processor."""


def place_ranks(
    cluster: ClusterSection, table: Roles, roles: Sequence[RolePlan], machine: Machine
) -> list[RankPlacement]:
    """Return the placement of every rank; empty where the machines are not known or cannot hold all ranks."""
    if gpu_problems(cluster, table, roles, machine) or (joins(cluster) and not machine.given):
        return []
    if joins(cluster):
        return _spread_out(cluster, table, roles, machine)[0]
    return [
        RankPlacement(role, rank, 0, tuple(gpus_of(device)))
        for role in roles
        for rank, device in enumerate(role.devices)
    ]


def gpu_problems(cluster: ClusterSection, table: Roles, roles: Sequence[RolePlan], machine: Machine) -> list[Problem]:
    """Return the GPUs, cores and resources that the machines lack, as far as the machines are known."""
    wanted = sum(max(table[role].gpus for role in group) for group in table.groups)
    who, nodes = ("the given machine", [machine]) if machine.given else ("this machine", [machine])
    if joins(cluster):
        if not machine.given:
            return []
        nodes = list(machine.nodes)
        who = f"the {len(nodes)} given machines" if machine.others else who
    there = sum(node.gpus for node in nodes)
    if wanted > there:
        verb = "have" if len(nodes) > 1 else "has"
        return [Problem("cluster.gpus", f"asks for {wanted} GPUs; {who} {verb} {there}")]
    unplaced = _spread_out(cluster, table, roles, machine)[1] if joins(cluster) else []
    return [
        Problem("cluster", f"no machine of {who} has room left for {one}; change gpus, threads, resources or placement")
        for one in unplaced[:1]
    ]


_Rank = tuple[RolePlan, int]


@frozen
class _Bundle:
    """The cores, GPUs and resources of one process, or of all processes that share GPUs."""

    ranks: tuple[_Rank, ...]
    gpus: tuple[int, ...]
    """The GPUs as the roles' devices name them."""
    cores: int
    resources: Mapping[str, float]

    def __str__(self) -> str:
        listed = [f"{self.cores} cores", f"{len(self.gpus)} GPUs" * bool(self.gpus)]
        listed += [f"{amount:g} {name}" for name, amount in self.resources.items()]
        found: dict[str, list[str]] = {}
        for role, rank in self.ranks:
            found.setdefault(role.role, []).append(str(rank))
        names = " and ".join(f"rank {', '.join(ranks)} of {role}" for role, ranks in found.items())
        return f"{names} ({', '.join(filter(None, listed))})"


@define
class _Free:
    """The free cores, GPUs and resources of a machine."""

    gpus: list[int]
    cores: float
    resources: dict[str, float]
    guests: dict[str, int] = field(factory=dict)
    """Processes by the name of their group."""

    def holds(self, bundle: _Bundle) -> bool:
        there = all(self.resources.get(name, 0) >= amount for name, amount in bundle.resources.items())
        return there and len(self.gpus) >= len(bundle.gpus) and self.cores >= bundle.cores

    def take(self, bundle: _Bundle, group: str) -> dict[int, int]:
        """Reserve what a bundle takes. Return the GPU here for each GPU that its devices name."""
        self.cores -= bundle.cores
        self.guests[group] = self.guests.get(group, 0) + 1
        for name, amount in bundle.resources.items():
            self.resources[name] -= amount
        taken, self.gpus = self.gpus[: len(bundle.gpus)], self.gpus[len(bundle.gpus) :]
        return dict(zip(bundle.gpus, taken, strict=True))


def _spread_out(
    cluster: ClusterSection, table: Roles, roles: Sequence[RolePlan], machine: Machine
) -> tuple[list[RankPlacement], list[str]]:
    """Place processes on machines about as a launcher does. The second list names processes without a machine."""
    free = [_Free(list(range(node.gpus)), node.cores or math.inf, dict(node.resources)) for node in machine.nodes]
    found, unplaced = list[RankPlacement](), list[str]()
    for names in table.groups:
        group = "+".join(names)
        bundles = _bundles(cluster, [role for role in roles if role.role in names])
        placement = next((word for name in names if (word := cluster.placement.get(name))), "pack")
        only = _one_for_all(free, bundles) if placement == "one-node" else None
        for bundle in bundles:
            node = only if only is not None else _choose(free, bundle, group, placement)
            if node == _NO_MACHINE:
                unplaced.append(str(bundle))
                continue
            gpus = free[node].take(bundle, group)
            for role, rank in bundle.ranks:
                found.append(RankPlacement(role, rank, node, tuple(gpus[gpu] for gpu in gpus_of(role.devices[rank]))))
    return found, unplaced


def _bundles(cluster: ClusterSection, sharing: Sequence[RolePlan]) -> list[_Bundle]:
    """Return the bundles that must be on one machine each: a process, or all processes that share GPUs."""
    living = [
        ((role, rank), ((role.processes, rank), *gpus_of(device)))
        for role in sharing for rank, device in enumerate(role.devices)
    ]  # fmt: skip
    return [_bundle(cluster, ranks) for ranks in connected(living)]


def _bundle(cluster: ClusterSection, ranks: Sequence[_Rank]) -> _Bundle:
    """Return the sum of what the ranks of a role take. Of roles that share, the largest counts: they take turns."""
    count = Counter(role.role for role, _ in ranks)
    resources: dict[str, float] = {}
    for name, number in count.items():
        for resource, amount in cluster.resources.get(name, {}).items():
            resources[resource] = max(resources.get(resource, 0), number * amount)
    gpus = sorted({gpu for role, rank in ranks for gpu in gpus_of(role.devices[rank])})
    return _Bundle(tuple(ranks), tuple(gpus), max(role.threads * count[role.role] for role, _ in ranks), resources)


def _choose(free: Sequence[_Free], bundle: _Bundle, group: str, placement: str) -> int:
    """Return the machine of a process: to spread, the one with fewest processes of its group, else with the most."""
    sign = 1 if placement == "spread" else -1

    def order(node: int) -> tuple[float, ...]:
        one = free[node]
        gpus = -len(one.gpus) if bundle.gpus else len(one.gpus)
        return sign * one.guests.get(group, 0), gpus, -one.cores, node

    return min((node for node in range(len(free)) if free[node].holds(bundle)), key=order, default=_NO_MACHINE)


def _one_for_all(free: Sequence[_Free], bundles: Sequence[_Bundle]) -> int:
    """Return the machine that can hold all processes of a group."""
    sums = Counter[str]()
    for bundle in bundles:
        sums.update(bundle.resources)
    gpus = tuple(gpu for bundle in bundles for gpu in bundle.gpus)
    return _choose(free, _Bundle((), gpus, sum(bundle.cores for bundle in bundles), sums), "", "pack")
