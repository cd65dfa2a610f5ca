"""Where Ray places processes: each group of roles gets a placement group, and each process gets a bundle in it.

Processes that share GPUs are in one bundle, so on one node.
"""

import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from attrs import frozen

from whet.errors import ClusterGone, WhetError
from whet.plan.placement import connected
from whet.runtime.hosts import Host
from whet_ray.node_agent import CONTROL_THREADS, THREADS, NodeAgent
from whet_ray.session import PROCESS, Node, RaySession
from whet_ray.shared_gpus import SharedGpus, hold

STRATEGIES: Final = {"pack": "PACK", "spread": "SPREAD", "one-node": "STRICT_PACK"}
"""Ray's placement strategy for each value of `cluster.placement`."""
_PATIENCE_FOR_NODES: Final = 30.0
"""Seconds to wait for a bundle that no present node can hold, because more nodes may join soon."""
_PATIENCE_FOR_AN_END: Final = 10.0
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.2
_LOOK_SECONDS: Final = 5.0
"""Seconds between two queries for the nodes of a placed group's bundles."""


class Names:
    """The names of a run's processes and placement groups in Ray's lists and dashboard.

    actor             whet:RUN:ROLES-RANK     a restarted process gets ~2, ~3 after its rank
    namespace         whet:RUN~TAG            the actors of one run only; TAG is random
    placement group   whet:RUN:ROLES~TAG      groups have no namespace, so the tag is in their name
    """

    def __init__(self, run: str) -> None:
        self._run, self._tag = run, secrets.token_hex(4)
        self._starts = Counter[str]()
        self._lock = threading.Lock()

    @property
    def namespace(self) -> str:
        """Return the namespace of all actors of the run."""
        return f"whet:{self._run}~{self._tag}"

    def of_process(self, host: Host) -> str:
        """Return the name of the actor for the next start of a process."""
        name = f"whet:{self._run}:{'+'.join(host.roles)}-{host.name.rpartition('-')[2]}"
        with self._lock:
            self._starts[name] += 1
            starts = self._starts[name]
        return name if starts == 1 else f"{name}~{starts}"

    def of_group(self, host: Host) -> str:
        """Return the name of the placement group for the processes with the same roles as this one."""
        return f"whet:{self._run}:{'+'.join(host.roles)}~{self._tag}"


@frozen(eq=False)
class Bundle:
    """The place of one process, or of several that share GPUs, in a placement group that exists already."""

    group: Any
    index: int
    resources: Mapping[str, float]
    session: RaySession
    shared: SharedGpus | None = None
    """None: one process has the bundle for itself."""

    def start(self, name: str, namespace: str) -> Any:
        """Start a node agent in this bundle, with all resources of the bundle if it is alone there, and return it."""
        rest = dict(self.resources) if self.shared is None else {}
        cpus, gpus = rest.pop("CPU", 0), rest.pop("GPU", 0)
        strategy = _strategy(self.group, self.index)
        ray: Any = import_module("ray")
        return (
            ray.remote(concurrency_groups={"control": CONTROL_THREADS})(NodeAgent)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                resources=rest,
                max_restarts=0,
                max_concurrency=THREADS,
                scheduling_strategy=strategy,
                name=name,
                namespace=namespace,
            )
            .remote()
        )

    def node(self) -> str:
        """Return a name of the bundle's node: its address and the beginning of its id."""
        from ray.util import placement_group_table

        id = placement_group_table(self.group).get("bundles_to_node_id", {}).get(self.index, "")
        address = next((node.address for node in self.session.nodes if node.id == id), "")
        return f"{address} ({id[:8]})" if address else id[:8] or "?"


class Places:
    """All bundles of a cluster. A process that is started again gets the bundle that it had."""

    def __init__(
        self,
        session: RaySession,
        placement: Mapping[str, str],
        resources: Mapping[str, Mapping[str, float]],
        names: Names,
    ) -> None:
        self._session, self._placement, self._resources = session, placement, resources
        self._names = names
        self._bundles: dict[str, Bundle] = {}
        self._groups: list[Any] = []
        self._looked: dict[int, tuple[float, Mapping[str, Any]]] = {}
        """For each group: the time of the last query for Ray's record of it, and the record."""
        self._lock = threading.Lock()

    def bundle(self, host: Host, group: Sequence[Host], deadline: float, stopped: threading.Event) -> Bundle:
        """Wait until Ray has placed a process's bundle, and return it.

        Raises `WhetError` if Ray does not place it. The error names the requested resources and those of the cluster.
        Raises `ClusterGone` if a Ray that whet started has removed the placement group.
        """
        with self._lock:
            if host.name not in self._bundles:
                self._claim([other for other in group if other.name not in self._bundles])
            bundle = self._bundles[host.name]
        began, pause = time.monotonic(), _FIRST_PAUSE
        while not self._is_placed(bundle.group, pause):
            if stopped.wait(pause):
                raise WhetError("its process was closed while it waited for a place")
            pause = min(2 * pause, _LONGEST_PAUSE)
            with self._lock:
                together = [one for one in dict.fromkeys(self._bundles.values()) if one.group is bundle.group]
            self.refuse_hopeless(together, began, deadline)
        return bundle

    def placed(self, bundle: Bundle) -> bool:
        """Return whether Ray reports that a bundle is on a node. Ray notices the loss of a node with a delay."""
        with suppress(Exception):  # Ray does not answer; the caller has a deadline
            nodes: Mapping[int, str] = self._record(bundle.group, _LOOK_SECONDS).get("bundles_to_node_id", {})
            return bool(nodes.get(bundle.index, "unknown"))
        return True

    def nodes(self, hosts: Sequence[Host]) -> set[str]:
        """Return Ray's ids of the nodes on which processes are placed."""
        from ray.util import placement_group_table

        with self._lock:
            bundles = [self._bundles[host.name] for host in hosts if host.name in self._bundles]
        tables = {bundle.group.id: placement_group_table(bundle.group)["bundles_to_node_id"] for bundle in bundles}
        return {node for bundle in bundles if (node := tables[bundle.group.id].get(bundle.index))}

    def refuse_hopeless(self, bundles: Sequence[Bundle], began: float, deadline: float) -> None:
        """Raise `WhetError` if unplaced bundles are past their deadline, or have waited too long and fit on no node.

        `began` is the time since which the bundles have had no place.
        """
        now = time.monotonic()
        hopeless = now - began > min(_PATIENCE_FOR_NODES, 0.5 * (deadline - began)) and not self._fit(bundles)
        if now > deadline or hopeless:
            raise WhetError(self._refusal(bundles, now - began, hopeless))

    def close(self) -> None:
        """Remove all placement groups, if Ray still runs."""
        import ray

        if self._groups and ray.is_initialized():
            with suppress(WhetError):  # Ray is lost, and removes the groups when it notices that the driver has ended
                self._session.life.ask(self._remove, _PATIENCE_FOR_AN_END)
        self._groups.clear()

    def _is_placed(self, group: Any, seconds: float) -> bool:
        """Return whether Ray has placed a group, by a record that is at most `seconds` old.

        The group's own `wait` would be no better: it takes whole seconds, and leaves a waiter in Ray's head each time.
        """
        try:
            state = self._record(group, seconds).get("state", "REMOVED")
            why = "Ray has lost a placement group of this run" if state == "REMOVED" else ""
        except Exception as error:  # Ray has no class of its own for that
            state, why = "", f"Ray has lost a placement group of this run: {error}"
        if not why and state != "CREATED" and self._session.local and not self._session.nodes:
            why = "Ray has given up its only node"
        if not why:
            return bool(state == "CREATED")
        if not self._session.local:
            raise WhetError(why)
        self._session.life.end(why)
        raise ClusterGone(why)

    def _record(self, group: Any, seconds: float) -> Mapping[str, Any]:
        """Return Ray's record of a group, at most `seconds` old. All processes that start share one query."""
        from ray.util import placement_group_table

        with self._lock:
            looked, record = self._looked.get(id(group), (-math.inf, {}))
            if time.monotonic() - looked > seconds:
                self._looked[id(group)] = time.monotonic(), record  # the next query comes as late if this one fails
                record = placement_group_table(group)
                self._looked[id(group)] = time.monotonic(), record
        return record

    def _remove(self) -> None:
        from ray.util import remove_placement_group

        for group in list(self._groups):
            remove_placement_group(group)

    def _claim(self, hosts: Sequence[Host]) -> None:
        from ray.util import placement_group

        places = connected((host, (host.name, *host.gpus)) for host in hosts)
        wanted = [self._wanted(place) for place in places]
        roles = [role for host in hosts for role in host.roles]
        word, name = next((self._placement[role] for role in roles if role in self._placement), "pack"), self._names
        group = placement_group(wanted, strategy=STRATEGIES[word], name=name.of_group(hosts[0]))
        self._groups.append(group)
        for index, place in enumerate(places):
            strategy, holder = _strategy(group, index), f"{name.of_group(hosts[0])}:gpus-{index}"
            shared = hold(place, strategy, holder, name.namespace) if len(place) > 1 else None
            bundle = Bundle(group, index, wanted[index], self._session, shared)
            self._bundles |= dict.fromkeys((host.name for host in place), bundle)

    def _wanted(self, place: Sequence[Host]) -> dict[str, float]:
        """Return what processes that share GPUs take: the most that one group of roles takes together."""
        found: dict[str, float] = {}
        for roles in dict.fromkeys(host.roles for host in place):
            own = [self._wanted_by(host) for host in place if host.roles == roles]
            for name in own[0]:
                found[name] = max(found.get(name, 0), sum(each[name] for each in own))
        gpus = {gpu for host in place for gpu in host.gpus}
        return {**found, "GPU": len(gpus)} if gpus else found

    def _wanted_by(self, host: Host) -> dict[str, float]:
        own: dict[str, float] = {PROCESS: 1} if self._session.local else {"CPU": host.threads}
        asked = {name: amount for role in host.roles for name, amount in self._resources.get(role, {}).items()}
        return {**own, **({"GPU": len(host.gpus)} if host.gpus else {}), **asked}

    def _fit(self, bundles: Sequence[Bundle]) -> bool:
        """Return whether each bundle would fit on some present node if the node were empty.

        This is an estimate: it does not check whether the bundles fit together.
        """
        nodes = self._session.nodes
        return all(any(_holds(node, bundle.resources) for node in nodes) for bundle in bundles)

    def _refusal(self, bundles: Sequence[Bundle], seconds: float, hopeless: bool) -> str:
        specs = [_listed(bundle.resources) for bundle in bundles]
        asked = "; ".join(f"{specs.count(spec)} x {spec}" for spec in dict.fromkeys(specs))
        found = "; ".join(map(str, self._session.nodes)) or "no nodes"
        why = "no node can hold that" if hopeless else "they are in use, or cannot be placed together as asked"
        return (
            f"Ray has not placed it within {seconds:.0f} s: asked for {asked}, and the cluster has {found}: {why}; "
            "change cluster.threads, gpus, resources or placement, or add nodes"
        )


def _strategy(group: Any, index: int) -> Any:
    """Return Ray's scheduling strategy for an actor in a bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, index)


def _holds(node: Node, bundle: Mapping[str, float]) -> bool:
    return all(node.resources.get(name, 0) >= amount for name, amount in bundle.items())


def _listed(resources: Mapping[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if name != PROCESS}
    return " + ".join(f"{name} {amount:g}" for name, amount in shown.items()) or "a process"
