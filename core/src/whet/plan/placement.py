"""Where roles run, and how weights travel between them: pure, from config and facts."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from attrs import field, frozen

from whet.component import AdapterInfo, GeneratorFacts, MemoryTerm, Problem
from whet.config.cluster import ClusterSection
from whet.errors import ConfigError
from whet.interfaces.weights import IN_PLACE, STREAMED
from whet.plan.roles import Role, Roles
from whet.plugins.launchers import address

T = TypeVar("T")


@frozen
class Machine:
    """The machine to plan for: one machine, or the first of several."""

    cores: int
    """0: not known."""
    gpus: int = 0
    memory_bytes: int | None = None
    """Memory of the host in bytes; None: not known."""
    gpu_bytes: tuple[int | None, ...] = ()
    """Memory of each GPU in bytes; empty: not known."""
    resources: Mapping[str, float] = field(factory=dict)
    """Custom resources of it as a node of a cluster."""
    others: tuple["Machine", ...] = ()
    """Further machines of a cluster."""
    given: bool = False
    """Whether the user has described it, rather than whet looked at it."""

    @property
    def nodes(self) -> "tuple[Machine, ...]":
        """Return all machines, this one first."""
        return (self, *self.others)


@frozen
class RolePlan:
    """Where one role runs."""

    role: str
    component: str
    ranks: int
    threads: int
    """Compute threads for each rank."""
    devices: tuple[str, ...]
    """One for each rank."""
    processes: str
    """Name of the group of processes; roles with equal names share theirs and take turns. Roles that share GPUs alone
    take turns, too."""
    memory: tuple[MemoryTerm, ...] = ()
    """The memory terms of each rank, as far as they are known."""
    python: str = ""
    """Its Python environment, as the config names it; empty: the driver's."""


@frozen
class Way:
    """How weights travel from backend to generator."""

    transport: str
    reason: str
    """Why that way: where the two are, or whose choice it is."""
    senders: int = 1
    receivers: int = 1
    adapter: AdapterInfo | None = None
    """See `whet.interfaces.weights.TransferSpec`."""


def joins(cluster: ClusterSection) -> bool:
    """Return whether the run's processes are on nodes of a cluster that is there, rather than on this machine."""
    return cluster.workers != "inline" and bool(address(cluster))


def plan_role(cluster: ClusterSection, roles: Roles, name: str, machine: Machine, overlaps: bool) -> RolePlan:
    """Return the ranks, threads, devices and memory of a role. `overlaps`: generation and training at one time."""
    role, groups = roles[name], roles.groups
    # Roles that share take turns; roles apart work at one time.
    others = sum(max(roles[other].ranks for other in group) for group in groups if group != role.group)
    busy = role.ranks + others if overlaps else role.ranks
    # What cores the nodes of a cluster have is not known here.
    threads = cluster.threads.get(name, 1 if joins(cluster) else max(1, machine.cores // max(1, busy)))
    first = sum(max(roles[other].gpus for other in group) for group in groups[: groups.index(role.group)])
    devices = _devices(first, role.gpus, role.ranks, role.facts.processes)
    component, python = role.selection.name, cluster.python.get(name, "")
    terms = tuple(role.facts.memory(role.ranks, role.trained)) if role.facts.memory else ()
    return RolePlan(name, component, role.ranks, threads, devices, "+".join(roles.in_process(name)), terms, python)


def gpus_of(device: str) -> list[int]:
    """Return the GPUs that a device names: of `cuda:2,3` 2 and 3, of `cpu` none."""
    return [] if device == "cpu" else [int(gpu) for gpu in device.removeprefix("cuda:").split(",")]


def _devices(first: int, gpus: int, ranks: int, each: int) -> tuple[str, ...]:
    """Return the GPUs of each rank, `each` to a rank, in order. If there are too few, further ranks share them."""
    places = [first + rank * each % max(1, gpus - gpus % each) for rank in range(ranks)]
    return tuple("cuda:" + ",".join(str(place + i) for i in range(each)) if gpus else "cpu" for place in places)


def gpus_apart(roles: Roles) -> Iterator[Problem]:
    """Find roles whose GPUs cannot be dealt out to their ranks."""
    for role in roles:
        gpus, each = role.gpus, role.facts.processes
        if gpus % each:
            yield Problem(f"cluster.gpus.{role.name}", f"is {gpus}, and a rank takes {each}; wanted a multiple of that")
        if not role.generates and 0 < gpus < role.ranks * each:
            words = f"is {role.ranks}, and ranks that train need a GPU each: cluster.gpus.{role.name} is {gpus}"
            yield Problem(f"cluster.ranks.{role.name}", f"{words}; leave the ranks out, or raise the GPUs")
    for group in roles.groups:
        taken = {name: roles[name].facts.processes for name in group if roles[name].gpus}
        if any(more % less for less, more in pairwise(sorted(taken.values()))):
            listed = ", ".join(f"{name} {each}" for name, each in taken.items())
            words = "wanted numbers of which the smaller divide the larger"
            yield Problem("cluster.colocate", f"of roles that share GPUs, a rank takes {listed}; {words}")


def gpus_unstated(roles: Roles, stated: Collection[str]) -> Iterator[Problem]:
    """Find roles that share the devices of roles with GPUs and are not among those of `cluster.gpus`."""
    for group in ([name for name in group if name in roles.names] for group in roles.groups):
        taken = [name for name in group if roles[name].gpus]
        for name in (name for name in group if taken and name not in stated):
            words = f"is missing, and {name} shares the devices of {taken[0]}; state its GPUs, 0 for the CPU"
            yield Problem(f"cluster.gpus.{name}", words)


def connected(items: Iterable[tuple[T, Collection[Hashable]]]) -> list[list[T]]:
    """Return items, each with at least one key, in groups that share keys, directly or through others; in order."""
    leads = dict[Hashable, Hashable]()

    def first(key: Hashable) -> Hashable:
        while leads.setdefault(key, key) != key:
            key = leads[key]
        return key

    heads = list[tuple[T, Hashable]]()
    for item, keys in items:
        head, *others = keys
        heads.append((item, head))
        for other in others:
            leads[first(other)] = first(head)
    groups = dict[Hashable, list[T]]()
    for item, head in heads:
        groups.setdefault(first(head), []).append(item)
    return list(groups.values())


def adapter_of(content: str, roles: Roles, name: str, transport: str) -> tuple[AdapterInfo | None, str]:
    """Return the adapter that travels to a generator without its base, if one does, and the reason as words.

    Raises `ConfigError` where `weight_sync.content` wants one that cannot.
    """
    adapter, facts, who = roles.backend.adapter, roles[name].facts, roles[name].selection.name
    lacking = sorted({*adapter.kinds} - facts.adapters) if adapter and isinstance(facts, GeneratorFacts) else []
    if adapter is None:
        why = "the backend trains none"
    elif name != "generator":
        why = f"{name} may begin with other weights than the adapter's"
    elif lacking or transport in STREAMED:
        why = f"{who} applies no adapter of {lacking[0]}" if lacking else f"{transport} carries all weights"
    else:
        why = "weight_sync.content says" if content == "merged" else ""
    if content == "adapter" and why and name == "generator":
        raise ConfigError(f"weight_sync.content is adapter, but {why}; set it to auto")
    if adapter is None or why:
        return None, f"; the adapter merged into them, as {why}" if adapter else ""
    return adapter, f"; the adapter alone, which {who} applies"


def way_of(cluster: ClusterSection, roles: Roles, name: str = "generator", content: str = "auto") -> Way:
    """Choose how weights travel to a generator. Raises `ConfigError`."""
    backend, generator, inline = roles["backend"], roles[name], cluster.workers == "inline"
    together = inline or name in backend.group
    ranks, receivers = (backend.ranks, generator.ranks), generator.ranks * generator.facts.processes
    # The ranks that send reach by reference only who shares their own process.
    aligned = (inline or name in roles.in_process("backend")) and len(set(ranks)) == 1
    same_process = aligned and set(ranks) == {1}
    one_node = together and cluster.placement.get("backend", cluster.placement.get(name))
    same_host = same_process or not joins(cluster) or one_node == "one-node"
    gpus = (backend.gpus, generator.gpus)
    one_form = backend.facts.in_place == generator.facts.in_place
    devices = min(backend.gpus, backend.ranks), min(generator.gpus, receivers)
    in_place = aligned and one_form and len(set(devices)) == 1
    if why := _apart(backend, generator, in_place=in_place):
        raise ConfigError(why)
    adapter, words = adapter_of(content, roles, name, cluster.transport)
    # NCCL refuses two members of a group on one GPU.
    own_gpus = all(gpus) and not together and backend.ranks <= backend.gpus and receivers <= generator.gpus
    reachable = {
        IN_PLACE: in_place, "shared": same_process,
        "cuda-ipc": all(gpus) and len({*gpus, backend.ranks, receivers}) == 1 and together and not inline,
        "broadcast": own_gpus or (cluster.transport == "broadcast" and not together), "shared-memory": True,
        "disk": True,
    }  # fmt: skip
    place = "on one machine" if same_host else "on nodes that the launcher will choose"
    place = "in one process" if same_process else place
    offered = [one for one in backend.facts.transports if adapter is None or one not in STREAMED]
    transport = choose_transport(offered, generator.facts.transports, reachable, cluster.transport, place)
    where = "in the same processes" if transport == IN_PLACE else place
    if same_process and transport not in (IN_PLACE, "shared"):
        where += ", and not both offer shared"
    if transport == IN_PLACE and roles.backend.adapter and adapter is None:
        words = "; the adapter is beside them"
    reason = ("as cluster.transport says" if cluster.transport else f"as they are {where}") + words
    if transport == "cuda-ipc":
        return Way(transport, reason, backend.ranks)
    senders = roles.backend.senders if adapter is None else 1
    return Way(transport, reason, senders, receivers if transport == "broadcast" else 1, adapter)


def _apart(backend: Role, generator: Role, *, in_place: bool) -> str:
    """Return why a generator that only computes with the backend's weights in place cannot. Empty: it can."""
    if generator.facts.transports != (IN_PLACE,):
        return ""
    own, which = "or have the generator hold weights of its own", f"the generator {generator.selection.name}"
    offered = backend.facts.in_place if IN_PLACE in backend.facts.transports else ""
    if offered != generator.facts.in_place:
        found = f"lends them in the form {offered}" if offered else "lends none"
        return (
            f"{which} computes with the backend's weights in the form {generator.facts.in_place}, and the backend "
            f"{backend.selection.name} {found}; choose another backend, {own}"
        )
    if in_place:
        return ""
    ranks = f"the backend has {backend.ranks} and the generator {generator.ranks}"
    return (
        f"{which} computes with the backend's weights in place, which needs equally many ranks ({ranks}) in the same "
        "processes and on the same devices; put both into one group of cluster.colocate, with equal cluster.ranks or "
        f"cluster.gpus and one Python, {own}"
    )


def choose_transport(
    sender: Sequence[str], receiver: Sequence[str], reachable: Mapping[str, bool], wanted: str, place: str
) -> str:
    """Choose the way to hand weights over: the sender's best that the receiver knows and that reaches it.

    `sender` and `receiver` are the transports of their facts, best first. `reachable` says of each transport whether
    the placement allows it, `wanted` is what the config insists on, and `place` says in words where the two are.
    Raises `ConfigError` saying why none fits.
    """
    for transport in [wanted] if wanted else sender:
        if transport in sender and transport in receiver and reachable.get(transport, False):
            return transport
    what = f"{wanted} is no way to hand weights over" if wanted else "no way to hand weights over"
    raise ConfigError(
        f"{what}: the backend offers {_listed(sender)}, the generator takes {_listed(receiver)}, and they are {place}; "
        "`in-place` needs shared processes with equally many ranks (cluster.colocate, cluster.ranks), `shared` one "
        "process, `cuda-ipc` shared GPUs, `broadcast` processes of their own"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
