"""From a config and the facts of its components to a plan: pure and printable. Everything that can be known here is
refused here.

Config + ModelInfo + Facts + Machine  ->  Plan(roles, transport, notes)   or every problem at once
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
from attrs import frozen

from whet.component import FACTS, Facts, MemoryTerm, Problem, Selection, resolve
from whet.config.build import named_errors
from whet.config.messages import kind_word
from whet.config.sections import Config
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError, PluginError
from whet.interfaces.weights import IN_PLACE
from whet.plan.colocation import find_turns
from whet.plan.compatibility import config_problems
from whet.plan.evaluation import with_answers
from whet.plan.memory import Room, memory_problems, rooms
from whet.plan.placement import Machine, RolePlan, Way, gpus_unstated, plan_role, way_of
from whet.plan.rank_placement import gpu_problems
from whet.plan.roles import Roles, selections

Of = TypeVar("Of", bound=Facts)


@frozen
class Plan:
    """All that is decided before anything starts."""

    launcher: str
    inline: bool
    roles: tuple[RolePlan, ...]
    way: Way | None
    """How weights travel from backend to generator; None without a generator."""
    feeds_on: str
    """`rollouts` or `data`."""
    turns: tuple[tuple[str, ...], ...]
    """Roles that release their memory while the others work: the roles of training, of generation; empty: none."""
    max_context: int
    """Longest sequence of rollouts, in tokens; 0: no limit is known."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Reasons why this machine cannot run it, though another one might."""
    memory: tuple[Room, ...] = ()
    """Memory that every host and GPU must have at least; empty: the placement of the roles is not known."""
    refusals: tuple[str, ...] = ()
    """Reasons why the run does not fit on the machine that it was planned for, and must not be started."""
    peaks: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """The predicted peak of memory of one rank of each role in each phase; see the feature `memory-forecast`."""
    role_ways: Mapping[str, Way] = attrs.field(factory=dict)
    """How weights travel to further generators, those with `sync_every`."""
    max_length: int = 0
    """Longest sequence of data files that are trained on; 0: no limit is known, or there are none."""

    def role(self, name: str) -> RolePlan:
        """Find a role by its name."""
        return next(role for role in self.roles if role.role == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as builtins."""
        return attrs.asdict(self)

    def describe(self) -> str:
        """Return the plan as lines for people."""
        where = "this process" if self.inline else f"worker processes of the {self.launcher} launcher"
        lines = [f"feeds on {self.feeds_on}, in {where}"]
        for role in self.roles:
            ranks = f"{role.ranks} rank{'s' if role.ranks > 1 else ''}"
            processes = "" if self.inline else f", in processes {role.processes!r}"
            processes += f" of the Python {role.python!r}" if role.python else ""
            lines.append(
                f"{role.role}: {role.component}, {ranks} x {role.threads} thread{'s' if role.threads > 1 else ''} "
                f"on {', '.join(dict.fromkeys(role.devices))}{processes}"
            )
        if self.way is not None:
            lines.append(f"weights: backend -> generator by {self.way.transport}, {self.way.reason}")
        for name, way in self.role_ways.items():
            lines.append(f"weights: backend -> {name} by {way.transport}, {way.reason}")
        if self.turns:
            lines.append(f"take turns, asleep meanwhile: {' | '.join(map(', '.join, self.turns))}")
        if longest := self.max_length or self.max_context:
            lines.append(f"longest sequence: {longest} tokens")
        return "\n".join([*lines, *self.notes])


def gather_facts(config: Config, model: ModelInfo, models: Mapping[str, ModelInfo] | None = None) -> dict[str, Facts]:
    """Return the facts of every chosen component, by path into the config. `models` are the models of roles that have
    one of their own.

    They include whether the environments of an evaluation state answers.
    """
    own = {f"roles.{name}": info for name, info in (models or {}).items()}
    facts: dict[str, Facts] = {path: facts_of(one, own.get(path, model)) for path, one in selections(config)}
    return with_answers(config.evaluation, facts)


def facts_of(selection: Selection, model: ModelInfo, kind: type[Of] = Facts) -> Of:  # type: ignore[assignment] # PEP 696
    """Return the facts of a component, in the record of its kind. One without a function for them has the defaults."""
    wanted = FACTS[selection.kind]
    with named_errors(f"the facts of the {kind_word(selection.kind)} {selection.name!r} cannot be computed"):
        facts = resolve(selection.component.facts)(selection.config, model) if selection.component.facts else wanted()
    if not isinstance(facts, wanted) or not isinstance(facts, kind):
        found = type(facts).__name__
        raise PluginError(f"{selection.component.facts} returned {found}, wanted whet.component.{wanted.__name__}")
    return facts


def make_plan(
    config: Config, model: ModelInfo, roles: Roles, machine: Machine, models: Mapping[str, ModelInfo] | None = None,
    trains: bool = True,
) -> tuple[Plan | None, list[Problem]]:  # fmt: skip
    """Decide where everything runs. With problems there is no plan. `models` are the models of roles that have one of
    their own.

    Unless it `trains`, no weights travel.
    """
    facts, algorithm = roles.facts, roles.algorithm
    feeds_on = "rollouts" if "rollouts" in algorithm.inputs else "data"
    inline, staleness = config.cluster.workers == "inline", config.rollout.max_staleness
    turns, of_turns, sleepless = find_turns(config.cluster.offload, staleness, config.endpoint.serve, roles)
    problems = [*config_problems(config, model, roles, feeds_on, models or {}), *sleepless]
    problems += gpus_unstated(roles, config.cluster.gpus) if trains else ()  # other jobs start some of the roles
    ways, notes = dict[str, Way](), [*dict.fromkeys(note for path in sorted(facts) for note in facts[path].notes)]
    for role in roles if trains else ():
        try:
            if role.generates and role.sync_every:
                ways[role.name] = way_of(config.cluster, roles, role.name, config.weight_sync.content)
        except ConfigError as error:
            problems.append(Problem("cluster.transport" if config.cluster.transport else role.path, str(error)))
    way = ways.pop("generator", None)
    if config.generator is not None:
        if staleness and (inline or "generator" in roles.in_process("backend")):
            words = "backend and generator share their processes; cluster.colocate: [] sets them apart"
            why = "cluster.workers: inline keeps all in this process" if inline else words
            notes.append(f"generation does not overlap training: {why}")
        if staleness == 1 and config.rollout.order == "as_completed":
            notes.append("rollout.order: as_completed gives what fifo does below a rollout.max_staleness of 2")
    if inline and config.cluster.launcher != "local":
        notes.append(f"cluster.launcher: {config.cluster.launcher} is not used, as cluster.workers is inline")
    if problems:
        return None, problems
    context = config.rollout.max_context or model.max_positions
    planned = (plan_role(config.cluster, roles, name, machine, bool(staleness)) for name in roles.names)
    kept = config.cluster.recovery.enabled and config.cluster.recovery.replicas > 0
    every = {"backend": way, "generator": way, **ways}
    placed = tuple(_with_way(role, every.get(role.role), model, kept=kept) for role in planned)
    lacking = tuple(str(problem) for problem in gpu_problems(config.cluster, roles, placed, machine))
    found = rooms(config.cluster, roles, placed, turns, machine)
    full = tuple(str(problem) for problem in memory_problems(config.cluster, found, machine, roles, placed))
    # GPUs that this machine lacks are a warning, for the run may be meant for another one; a given machine is the one.
    plan = Plan(
        config.cluster.launcher, inline, placed, way, feeds_on, turns, context, (*notes, *of_turns),
        warnings=() if machine.given else lacking, memory=tuple(found),
        refusals=(*lacking, *full) if machine.given else full, role_ways=ways,
        max_length=(config.data.max_length or model.max_positions) if config.data and feeds_on == "data" else 0,
    )  # fmt: skip
    return plan, []


def _with_way(role: RolePlan, way: Way | None, model: ModelInfo, *, kept: bool) -> RolePlan:
    """Return a role with the memory that the way of the weights decides: what is lent, what wakes for a weight sync,
    and for the backend the copy of the weights that processes of one machine share, or that is `kept` for late
    receivers, in the smallest dtype.
    """
    in_place = way is not None and way.transport == IN_PLACE
    stays = {"weights", "adapter"} if way is None or in_place else {"weights"} if way.adapter else set[str]()
    if not in_place or role.role != "backend":
        role = attrs.evolve(role, memory=tuple(attrs.evolve(term, lent=False) for term in role.memory))
    terms = (attrs.evolve(term, woken="") if term.woken in stays else term for term in role.memory)
    role = attrs.evolve(role, memory=tuple(terms))
    changes = {"shared-memory": "cluster.transport: disk hands weights over by files"}
    if kept:
        late = "cluster.recovery.replicas: 0 keeps no copy for replicas that are restarted"
        changes |= {"broadcast": late, "cuda-ipc": late}
    if role.role != "backend" or way is None or way.adapter or way.transport not in changes or not model.parameters:
        return role
    shared = MemoryTerm(
        "weights for the generator", model.weight_bytes("bfloat16") // role.ranks, place="host",
        change=changes[way.transport],
    )  # fmt: skip
    return attrs.evolve(role, memory=(*role.memory, shared))
