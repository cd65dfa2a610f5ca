"""On which machine, and on which of its GPUs, each rank lives: pure, from the roles of a plan and the machines."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from attrs import define, field, frozen

from whet.component import Problem
from whet.config.cluster import ClusterSection
from whet.plan.placement import Machine, RolePlan, joins
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
        return _spread_out(cluster, roles, machine)[0]
    return [
        RankPlacement(role, rank, 0, tuple(_indices(device)))
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
    unplaced = _spread_out(cluster, roles, machine)[1] if joins(cluster) else []
    return [
        Problem("cluster", f"no machine of {who} has room left for {one}; change gpus, threads, resources or placement")
        for one in unplaced[:1]
    ]


def _indices(device: str) -> Iterable[int]:
    return map(int, device.removeprefix("cuda:").split(",")) if device != "cpu" else ()


@frozen
class _Bundle:
    """The cores, GPUs and resources that one process takes."""

    roles: tuple[RolePlan, ...]
    rank: int
    gpus: int
    cores: int
    resources: Mapping[str, float]

    def __str__(self) -> str:
        listed = [f"{self.cores} cores", f"{self.gpus} GPUs" * bool(self.gpus)]
        listed += [f"{amount:g} {name}" for name, amount in self.resources.items()]
        names = " and ".join(role.role for role in self.roles)
        return f"rank {self.rank} of {names} ({', '.join(filter(None, listed))})"


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
        return there and len(self.gpus) >= bundle.gpus and self.cores >= bundle.cores

    def take(self, bundle: _Bundle, group: str) -> tuple[int, ...]:
        self.cores -= bundle.cores
        self.guests[group] = self.guests.get(group, 0) + 1
        for name, amount in bundle.resources.items():
            self.resources[name] -= amount
        taken, self.gpus = self.gpus[: bundle.gpus], self.gpus[bundle.gpus :]
        return tuple(taken)


def _spread_out(
    cluster: ClusterSection, roles: Sequence[RolePlan], machine: Machine
) -> tuple[list[RankPlacement], list[str]]:
    """Place processes on machines about as a launcher does. The second list names processes without a machine."""
    free = [_Free(list(range(node.gpus)), node.cores or math.inf, dict(node.resources)) for node in machine.nodes]
    found, unplaced = list[RankPlacement](), list[str]()
    for group in dict.fromkeys(role.processes for role in roles):
        bundles = _bundles(cluster, [role for role in roles if role.processes == group])
        placement = next((word for r in bundles[0].roles if (word := cluster.placement.get(r.role))), "pack")
        only = _one_for_all(free, bundles) if placement == "one-node" else None
        for bundle in bundles:
            node = only if only is not None else _choose(free, bundle, group, placement)
            if node == _NO_MACHINE:
                unplaced.append(str(bundle))
                continue
            gpus = free[node].take(bundle, group)
            found += [
                RankPlacement(role, bundle.rank, node, gpus if role.devices[bundle.rank] != "cpu" else ())
                for role in bundle.roles
            ]
    return found, unplaced


def _bundles(cluster: ClusterSection, sharing: Sequence[RolePlan]) -> list[_Bundle]:
    made = []
    for rank in range(max(role.ranks for role in sharing)):
        here = tuple(role for role in sharing if role.ranks > rank)
        resources = {name: n for role in here for name, n in cluster.resources.get(role.role, {}).items()}
        gpus = max(len(list(_indices(role.devices[rank]))) for role in here)
        made.append(_Bundle(here, rank, gpus, max(role.threads for role in here), resources))
    return made


def _choose(free: Sequence[_Free], bundle: _Bundle, group: str, placement: str) -> int:
    """Return the machine of a process: one that has the fewest of its group to spread, else the most."""
    sign = 1 if placement == "spread" else -1

    def order(node: int) -> tuple[float, ...]:
        one = free[node]
        gpus = -len(one.gpus) if bundle.gpus else len(one.gpus)
        return sign * one.guests.get(group, 0), gpus, -one.cores, node

    return min((node for node in range(len(free)) if free[node].holds(bundle)), key=order, default=_NO_MACHINE)


def _one_for_all(free: Sequence[_Free], bundles: Sequence[_Bundle]) -> int:
    """Return the machine that can hold all processes of a group."""
    roles = bundles[0].roles
    sums: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.resources.items():
            sums[name] = sums.get(name, 0) + amount
    whole = _Bundle(roles, 0, sum(b.gpus for b in bundles), sum(b.cores for b in bundles), sums)
    return _choose(free, whole, "", "pack")
