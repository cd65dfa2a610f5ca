"""Starts the models of a run: worker processes for each role, and the handles by which the driver calls them."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from attrs import Factory, frozen

from whet.config.build import build_selection
from whet.data.spans import Spans
from whet.interfaces.logger import RunInfo
from whet.interfaces.weights import IN_PLACE
from whet.interfaces.workers import RoleContext
from whet.plan.prepare import Prepared
from whet.plan.roles import Role
from whet.run.colocation import Turns
from whet.run.handles import Around, BackendHandle, GeneratorHandle, busy, timed
from whet.run.inputs import Inputs
from whet.run.interrupts import Interrupts
from whet.run.observers import Observers
from whet.run.older_self import OlderSelf
from whet.run.recovery import Recovery
from whet.run.resume import Opened
from whet.run.run_folder import RunFolder
from whet.run.stall_monitor import StallMonitor
from whet.run.start_workers import WorkerGroups, build_groups, start_roles
from whet.run.startup_time import Startup
from whet.run.weight_sync import WeightSync, make_weight_sync

if TYPE_CHECKING:
    from whet.interfaces.generator import Generator
    from whet.interfaces.workers import WorkerGroup
    from whet.rollout.event_loop import EpisodeLoop


@frozen(eq=False)
class Attempt:
    """The objects that all parts of one run attempt share. A job beside a run has them, too."""

    folder: RunFolder
    observers: Observers
    closers: list[Callable[[], None]]
    """Functions that close what was built. They are called in reverse order."""
    recovery: Recovery
    interrupts: Interrupts = Factory(Interrupts)
    again: bool = False
    """Whether this process has built the run before, and lost its workers."""
    spans: Spans = Factory(Spans)
    roles: "dict[str, BackendHandle | GeneratorHandle]" = Factory(dict)
    """Further models, by name, once they are started."""


@frozen(eq=False)
class Begun:
    """The parts of a run that exist before any model is started."""

    worker_groups: WorkerGroups
    stalls: StallMonitor
    inputs: Inputs
    run: Opened
    info: RunInfo
    startup: Startup


@frozen(eq=False)
class Models:
    """The models of a run with the handles by which the driver calls them."""

    built: Mapping[str, Any]
    """By role, as their components built them."""
    turns: Turns
    loop: "EpisodeLoop"
    backend: BackendHandle
    generator: GeneratorHandle | None
    trained: Mapping[str, BackendHandle]
    """The models that are trained, by the names of their folders in a checkpoint."""
    older: Sequence[OlderSelf] = ()
    """The roles that generate with older weights of the policy."""

    def within_turn(self, *around: Around) -> BackendHandle:
        """Return a handle of the backend. Each call begins the turn of the backend, and runs inside of `around`."""
        return BackendHandle(self.built["backend"], *self.turns.around("backend"), *around)

    def probe(self, requests: Coroutine[Any, Any, Any]) -> Any:
        """Begin the generator's turn, and run a coroutine whose requests to the generator do not pass the gate."""
        self.turns.probing()
        return self.loop.run(requests)


def start_models(prepared: Prepared, attempt: Attempt, begun: Begun) -> tuple[Models, WeightSync | None]:
    """Start the workers of all roles. Roles that take turns sleep until their turn comes.

    Return the models, and the weight sync of the generator, whose ends are not connected yet.
    """
    from whet.rollout.event_loop import EpisodeLoop

    loop, spans, worker_groups, roles = EpisodeLoop(), attempt.spans, begun.worker_groups, prepared.roles
    scratch, on_update = attempt.folder.scratch, prepared.config.rollout.on_weight_update
    making = partial(
        make_weight_sync, section=prepared.config.cluster, cluster=worker_groups.cluster, spans=spans,
        closers=attempt.closers,
    )  # fmt: skip
    way = prepared.plan.way
    sync = making(way, scratch / "weights", on_weight_update=on_update) if way else None
    older = {
        name: OlderSelf(roles[name], making(way, scratch / f"weights-{name}"), scratch / name, begun.run.saved)
        for name, way in prepared.plan.role_ways.items()
    }
    begun.stalls.episodes = loop.where
    turns = Turns(prepared.plan.turns, spans, loop)
    attempt.closers.append(turns.close)
    try:
        built = start(prepared, attempt, prepared.roles.names, worker_groups.of, begun.info, sync, turns, older)
    finally:
        attempt.closers.append(loop.close)
    if worker_groups.cluster is not None:
        spans.add(worker_groups.cluster.launcher.preparations())
    backend = BackendHandle(built["backend"], *turns.around("backend"), timed(spans))
    generator = GeneratorHandle(
        built["generator"], *turns.requests(), busy(spans), receiving=partial(turns.took_weights, "generator"),
        vocabulary=prepared.model.vocab_size, name=roles["generator"].selection.name,
    ) if "generator" in built else None  # fmt: skip
    further = {f"roles/{name}": one for name, one in attempt.roles.items() if isinstance(one, BackendHandle)}
    trained = {name: one for name, one in further.items() if roles[name.removeprefix("roles/")].trained}
    for name, one in older.items():
        one.connect(backend, cast("Generator", attempt.roles[name]), turns.syncing)
    return Models(built, turns, loop, backend, generator, {"backend": backend, **trained}, tuple(older.values())), sync


def start(
    prepared: Prepared, attempt: Attempt, roles: Sequence[str], group_of: "Callable[[str], WorkerGroup]",
    info: RunInfo, sync: WeightSync | None = None, turns: Turns | None = None,
    older: Mapping[str, OlderSelf] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Start the workers of roles, and return what their components built. Add further models to `attempt.roles`.

    `turns`: each role sleeps as soon as it is started. `sync` sends weights to new replicas of the generator, and
    `older` to new replicas of further generators.
    """
    way, count = prepared.plan.way, prepared.roles.algorithm.optimizer_steps
    taken = count(info.steps) if count else {}
    asked, syncs = prepared.roles.asked_by(""), {"generator": sync, **{name: one.sync for name, one in older.items()}}

    def build(role: str) -> Any:
        context = RoleContext(
            worker_group=attempt.observers.hooks.whet_worker_group(role=role, group=group_of(role)),
            model=older[role].model(prepared.model) if role in older else prepared.models.get(role, prepared.model),
            run=info,
            seed=prepared.config.run.seed,
            scratch=attempt.folder.scratch.resolve(),
            status=attempt.observers.status,
            # With another chat template or tokenizer, a text may have more tokens than it has for the policy.
            max_context=0 if role in asked else prepared.plan.max_context,
            trained=role == "generator" or prepared.roles[role].trained,
            optimizer_steps=taken.get(role, info.steps),
            columns=prepared.roles.backend.columns_wanted if role == "generator" else frozenset(),
            adapter=way.adapter if role == "generator" and way else None,
            transport=way.transport if role == "generator" and way else "",
            replacing=attempt.recovery.replacing(weights.resync if (weights := syncs.get(role)) else None),
        )
        attempt.observers.status(f"{role} to start")
        with attempt.spans.phase(role, "start"):
            handle = build_selection(prepared.roles[role].selection, context)
        if turns is not None:
            turns.join(role, handle, lends=role == "backend" and way is not None and way.transport == IN_PLACE)
        return handle

    groups = [roles] if prepared.plan.inline else build_groups(map(prepared.plan.role, roles))
    built = start_roles(roles, groups, build, attempt.closers)
    for role in roles:
        if role in prepared.config.roles:
            attempt.roles[role] = _handle(prepared.roles[role], built[role], attempt.spans, turns)
    return built


def _handle(role: Role, built: Any, spans: Spans, turns: Turns | None) -> BackendHandle | GeneratorHandle:
    """Return the handle of a further model, by which it takes its turns."""
    if not role.generates:
        return BackendHandle(built, *(turns.around(role.name) if turns else ()), timed(spans, role.name))
    if turns is None:
        return GeneratorHandle(built, busy(spans, role.name))
    receiving, loop = partial(turns.took_weights, role.name), turns.loop.events
    return GeneratorHandle(built, *turns.requests(), busy(spans, role.name), receiving=receiving, loop=loop)
