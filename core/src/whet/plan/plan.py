"""From a config and the facts of its components to a plan: pure, printable, and refusing whatever it can know.

Config + ModelInfo + Facts + Machine  ->  Plan(roles, transport, notes)   or every problem at once
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import attrs
from attrs import frozen

from whet.component import (
    FACTS,
    AlgorithmFacts,
    EnvironmentFacts,
    Facts,
    GeneratorFacts,
    LossFacts,
    MemoryTerm,
    Problem,
    Selection,
    resolve,
)
from whet.config.cluster import ClusterSection
from whet.config.sections import Config, DataSection, RolloutSection, RunSection
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError, PluginError
from whet.plan.colocation import sleep_problems, turns_and_notes
from whet.plan.compatibility import incompatibilities
from whet.plan.evaluation import evaluation_problems
from whet.plan.memory import Room, fullest, memory_problems, rooms, size
from whet.plan.placement import Machine, RolePlan, Way, gpus_apart, joins, plan_role, way_of
from whet.plan.rank_placement import gpu_problems
from whet.plan.roles import Roles, python_problems
from whet.plugins.launchers import LOCAL

Of = TypeVar("Of", bound=Facts)

ALWAYS = frozenset({"tokens", "loss_mask", "lengths", "prompt_lengths", "group", "episode", "unit"})
"""Columns of every batch."""
ROLLOUT = frozenset({"sampler_logprobs", "version", "temperature", "env", "reward", "stopped"})
"""Columns of a batch from rollouts."""


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
    """Roles that give their memory back while the others work: those that train, those that generate; empty: none."""
    max_context: int
    """Longest sequence, in tokens; 0: no limit is known."""
    imports: tuple[str, ...] = ()
    """Modules that worker processes import while the driver still prepares."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Reasons why this machine cannot run it, though another one might."""
    memory: tuple[Room, ...] = ()
    """Memory that every host and GPU must have at least; empty: the placement of the roles is not known."""
    refusals: tuple[str, ...] = ()
    """Reasons why the run does not fit on the machine that it was planned for, and must not be started."""
    machines: int = 1
    """How many machines it was planned for."""

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
            memory = _memory_words(role)
            ranks = f"{role.ranks} rank{'s' if role.ranks > 1 else ''}"
            processes = "" if self.inline else f", in processes {role.processes!r}"
            processes += f" of the Python {role.python!r}" if role.python else ""
            lines.append(
                f"{role.role}: {role.component}, {ranks} x {role.threads} thread{'s' if role.threads > 1 else ''} "
                f"on {', '.join(dict.fromkeys(role.devices))}{memory}{processes}"
            )
        if self.way is not None:
            lines.append(f"weights: backend -> generator by {self.way.transport}, {self.way.reason}")
        if self.turns:
            lines.append(f"take turns, asleep meanwhile: {' | '.join(map(', '.join, self.turns))}")
        lines += [_room_words(room, self.machines) for room in fullest(self.memory).values()]
        if self.max_context:
            lines.append(f"longest sequence: {self.max_context} tokens")
        return "\n".join([*lines, *self.notes])


def _memory_words(role: RolePlan) -> str:
    if not role.memory_bytes:
        return ""
    if role.ranks == 1:
        return f", at least {size(role.memory_bytes)}"
    return f", at least {size(role.memory_bytes)} each, {size(role.ranks * role.memory_bytes)} in all"


def _room_words(room: Room, machines: int) -> str:
    """Return a line on how full a host or GPU is."""
    of = f" of its {size(room.has)}" if room.has is not None else ""
    where = f"{room.place} of machine {room.node + 1}" if machines > 1 else room.place
    largest = ", ".join(f"{size(number)} {words}" for words, number in room.terms[:2])
    return f"memory: {where} holds at least {size(room.needs)}{of}, most of it {largest}"


def gather_facts(config: Config, model: ModelInfo, models: Mapping[str, ModelInfo] | None = None) -> dict[str, Facts]:
    """Ask every chosen component for its facts, by path into the config. `models` are those of roles with their own."""
    own = {f"roles.{name}": info for name, info in (models or {}).items()}
    return {path: facts_of(selection, own.get(path, model)) for path, selection in selections(config)}


def facts_of(selection: Selection, model: ModelInfo, kind: type[Of] = Facts) -> Of:  # type: ignore[assignment] # PEP 696
    """Return the facts of a component, in the record of its kind. One without a function for them has the defaults."""
    wanted = FACTS[selection.kind]
    facts = resolve(selection.component.facts)(selection.config, model) if selection.component.facts else wanted()
    if not isinstance(facts, wanted) or not isinstance(facts, kind):
        found = type(facts).__name__
        raise PluginError(f"{selection.component.facts} returned {found}, wanted whet.component.{wanted.__name__}")
    return facts


def selections(value: Any, path: str = "") -> Iterator[tuple[str, Selection]]:
    """Walk all components chosen anywhere in a config, with their paths."""
    if isinstance(value, Selection):
        yield path, value
        yield from selections(value.config, path)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from selections(item, f"{path}.{i}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from selections(item, f"{path}.{key}")
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            inline = field.metadata.get("inline")
            yield from selections(getattr(value, field.name), path if inline else f"{path}.{field.name}".lstrip("."))


def make_plan(
    config: Config,
    model: ModelInfo,
    roles: Roles,
    machine: Machine,
    models: Mapping[str, ModelInfo] | None = None,
) -> tuple[Plan | None, list[Problem]]:
    """Decide where everything runs. With problems there is no plan. `models` are those of roles with their own."""
    facts, algorithm = roles.facts, roles.algorithm
    feeds_on = "rollouts" if "rollouts" in algorithm.inputs else "data"
    problems = [
        *_inputs(config, roles, feeds_on),
        *_epochs(config.run, config.data, config.algorithm.name, algorithm, feeds_on),
        *_needs(config, roles),
        *_losses(roles, feeds_on),
        *_weights(config.algorithm.name, roles),
        *incompatibilities(config.algorithm.name, roles),
        *_lengths(config.rollout, model, roles),
        *_conversations(config.rollout, model, roles, models or {}),
        *_shares(config.cluster, roles),
        *_updates(config.rollout, config.cluster.workers, roles),
        *sleep_problems(config, roles),
    ]
    way, notes = None, [note for path in sorted(facts) for note in facts[path].notes]
    if config.generator is not None:
        together = config.cluster.workers == "inline" or roles.share("backend", "generator")
        try:
            way = way_of(config.cluster, roles)
        except ConfigError as error:
            problems.append(Problem("cluster.transport" if config.cluster.transport else "generator", str(error)))
        if config.rollout.max_staleness and together:
            notes.append(f"generation does not overlap training: {_why_not_apart(config)}")
        if config.rollout.max_staleness == 1 and config.rollout.order == "as_completed":
            notes.append("rollout.order: as_completed gives what fifo does below a rollout.max_staleness of 2")
    if config.cluster.workers == "inline" and config.cluster.launcher != "local":
        notes.append(f"cluster.launcher: {config.cluster.launcher} is not used, as cluster.workers is inline")
    if problems:
        return None, problems
    turns, of_turns = turns_and_notes(config, roles)
    notes += of_turns
    context = config.rollout.max_context or model.max_positions
    inline = config.cluster.workers == "inline"
    imports = tuple(dict.fromkeys(module for role in roles for module in role.facts.imports))
    launcher = config.cluster.launcher
    overlaps = bool(config.rollout.max_staleness)
    planned = (plan_role(config.cluster, roles, name, machine, overlaps) for name in roles.names)
    placed = tuple(_with_handed_over(role, way, model) for role in planned)
    plan = Plan(launcher, inline, placed, way, feeds_on, turns, context, imports, tuple(notes))
    return on_machine(plan, config.cluster, roles, machine), []


def _with_handed_over(role: RolePlan, way: Way | None, model: ModelInfo) -> RolePlan:
    """Add the weights that processes of one machine share, in the smallest dtype, to what the backend holds."""
    if role.role != "backend" or way is None or way.transport != "shared-memory" or not model.parameters:
        return role
    change = "cluster.transport: disk hands weights over by files"
    shared = MemoryTerm(
        "weights for the generator", model.weight_bytes("bfloat16") // role.ranks, place="host", change=change
    )
    return attrs.evolve(role, memory=(*role.memory, shared))


def on_machine(plan: Plan, cluster: ClusterSection, roles: Roles, machine: Machine) -> Plan:
    """Add to a plan what a machine has for it and what it lacks.

    GPUs that this machine lacks are a warning, for the run may be meant for another one; that a given one lacks them
    is a refusal, as is too little memory.
    """
    gpus = [str(problem) for problem in gpu_problems(cluster, roles, plan.roles, machine)]
    found = rooms(cluster, roles, plan.roles, plan.turns, machine)
    full = [str(problem) for problem in memory_problems(cluster, found, machine)]
    return attrs.evolve(
        plan, memory=tuple(found), machines=len(machine.nodes), warnings=() if machine.given else tuple(gpus),
        refusals=(*gpus, *full) if machine.given else tuple(full),
    )  # fmt: skip


def _why_not_apart(config: Config) -> str:
    if config.cluster.workers == "inline":
        return "cluster.workers: inline keeps all in this process"
    return "backend and generator share their processes; cluster.colocate: [] sets them apart"


def _inputs(config: Config, roles: Roles, feeds_on: str) -> Iterator[Problem]:
    name = config.algorithm.name
    if feeds_on == "rollouts":
        if not config.environments:
            yield Problem("environments", f"{name} is fed by rollouts and there is no environment; list at least one")
        elif not any(entry.weight for entry in config.environments):
            yield Problem("environments", "none has a weight above 0; raise one's `weight`")
        if config.generator is None:
            yield Problem("generator", f"{name} is fed by rollouts and there is no generator; choose one by `use:`")
        if config.data is not None:
            yield Problem("data", f"{name} is fed by rollouts and reads no data files; remove this section")
    else:
        if config.data is None or not config.data.train:
            yield Problem("data", f"{name} trains on data files and there are none; list them under data.train")
        if config.environments:
            yield Problem("environments", f"{name} trains on data files; environments belong under evaluation")
    if config.evaluation.environments and config.generator is None:
        yield Problem("generator", "evaluation needs a generator; choose one by `use:`")
    yield from evaluation_problems(config, roles.of(EnvironmentFacts))
    if config.endpoint.serve and config.generator is None:
        yield Problem("endpoint.serve", "needs a generator; choose one by `use:`")
    for where, entries in (
        ("environments", config.environments),
        ("evaluation.environments", config.evaluation.environments),
    ):
        names = [entry.name or entry.component.name for entry in entries]
        for i, entry_name in enumerate(names):
            if entry_name in names[:i]:
                yield Problem(
                    f"{where}.{i}.name", f"there are two environments named {entry_name!r}; give one another name"
                )


def _epochs(
    run: RunSection, data: DataSection | None, name: str, algorithm: AlgorithmFacts, feeds_on: str
) -> Iterator[Problem]:
    """Find epochs of a run that has none, and data files whose weights do not go together."""
    if run.epochs is not None and feeds_on == "rollouts":
        yield Problem("run.epochs", f"{name} is fed by rollouts, which have no epochs; state run.steps")
    elif run.epochs is not None and not (algorithm.encode and algorithm.records_per_step):
        words = "does not state in its facts how it reads records (`encode`) and how many a step takes"
        yield Problem("run.epochs", f"{name} {words} (`records_per_step`); state run.steps")
    train, validation = (data.train, data.validation) if data else ([], [])
    lacking = [i for i, file in enumerate(train) if file.weight is None]
    for i in lacking if len(lacking) < len(train) else ():
        yield Problem(f"data.train.{i}.weight", "missing: other files of data.train have a weight, so all need one")
    for i, file in enumerate(validation):
        if file.weight is not None:
            yield Problem(f"data.validation.{i}.weight", "validation reads every record once; remove the weight")


def _needs(config: Config, roles: Roles) -> Iterator[Problem]:
    """Match the further models that are asked for with those that there are."""
    needs = roles.needs
    for name, need in needs.items():
        if name not in config.roles:
            wanted = f", with the output {', '.join(sorted(need.outputs))}" if need.outputs else ""
            yield Problem(f"roles.{name}", f"is missing: {config.algorithm.name} or an environment asks for it{wanted}")
            continue
        given = roles.outputs_of(name)
        for output in sorted(need.outputs - given):
            yield Problem(
                f"roles.{name}", f"must give the model output {output!r}; it gives {', '.join(sorted(given))}"
            )
    for name in config.roles:
        if name in ("backend", "generator"):
            yield Problem(f"roles.{name}", "is a section of its own; give this role another name")
        elif name not in needs:
            asked = f"; asked for are {', '.join(needs)}" if needs else ""
            yield Problem(f"roles.{name}", f"nobody asks for this role{asked}; remove it")


def _losses(roles: Roles, feeds_on: str) -> Iterator[Problem]:
    needs, given = roles.needs, {role.name: roles.outputs_of(role.name) for role in roles}
    columns = ALWAYS | roles.algorithm.columns_written | (ROLLOUT if feeds_on == "rollouts" else frozenset())
    own = LossFacts(outputs_needed=roles.algorithm.outputs_needed)
    for path, found in {"algorithm": own, **roles.of(LossFacts)}.items():
        told = needs[found.role].outputs if found.role in needs else frozenset()
        for output in sorted(found.outputs_needed - given.get(found.role, found.outputs_needed) - told):
            words = f"needs the model output {output!r}, which the {found.role} does not give: it gives"
            yield Problem(path, f"{words} {', '.join(sorted(given[found.role]))}")
        for column in sorted(found.columns_read - columns) if found.outputs_needed else ():
            yield Problem(path, f"reads the column {column!r}, which neither the batch nor the algorithm provides")


def _weights(name: str, roles: Roles) -> Iterator[Problem]:
    """Find sets of weights that the algorithm scores with and the backend does not hold."""
    where = roles["backend"].selection.name
    for weights in sorted(roles.algorithm.weights_needed - roles.backend.weights_given):
        why = f"{name} scores with the weights {weights!r}, and the backend {where} holds no such copy"
        yield Problem(f"backend.{weights}", f"{why}; set it to true")


def _lengths(rollout: RolloutSection, model: ModelInfo, roles: Roles) -> Iterator[Problem]:
    context = rollout.max_context
    if model.max_positions and context > model.max_positions:
        yield Problem("rollout.max_context", f"is {context}, but the model's positions end at {model.max_positions}")
    limit = context or model.max_positions
    if "generator" in roles.names and limit and rollout.max_tokens >= limit:
        yield Problem(
            "rollout.max_tokens", f"is {rollout.max_tokens}, which leaves no room for a prompt in {limit} tokens"
        )


def _conversations(
    rollout: RolloutSection, model: ModelInfo, roles: Roles, models: Mapping[str, ModelInfo]
) -> Iterator[Problem]:
    """Find models that read whole conversations and have fewer positions than those may have."""
    longest = rollout.max_context or model.max_positions
    for name, need in roles.needs.items():
        most = models.get(name, model).max_positions
        if need.conversations and name in roles.names and 0 < most < longest:
            yield Problem(
                "rollout.max_context",
                f"allows for conversations of {longest} tokens, and the positions of the role {name!r}, which reads "
                f"them, end at {most}: set it to {most} or less, or have the environment cut what is too long",
            )


def _updates(rollout: RolloutSection, workers: str, roles: Roles) -> Iterator[Problem]:
    """Find a `rollout.on_weight_update` that the generator cannot do. Without staleness no request is under way."""
    wanted = rollout.on_weight_update
    if "generator" not in roles.names or rollout.max_staleness == 0:
        return
    if wanted not in (possible := roles.of(GeneratorFacts)["generator"].on_weight_update):
        can, name = ", ".join(possible), roles["generator"].selection.name
        yield Problem("rollout.on_weight_update", f"is {wanted}; of the generator {name} it can be {can}")
    elif wanted == "continue" and workers == "process" and roles.share("backend", "generator"):
        yield Problem(
            "rollout.on_weight_update",
            "is continue, but backend and generator take turns in one process, so weights cannot be sent while a "
            "request runs; set them apart by cluster.colocate: []",
        )


def _shares(cluster: ClusterSection, roles: Roles) -> Iterator[Problem]:
    known = roles.known
    yield from python_problems(cluster, known)
    for key in ("ranks", "gpus", "threads"):
        for role in getattr(cluster, key):
            if role not in known:
                yield Problem(f"cluster.{key}.{role}", f"there is no such role; there are {', '.join(known)}")
    yield from _nodes(cluster, roles)
    for i, group in enumerate(cluster.colocate or []):
        for role in group:
            if role not in known:
                yield Problem(f"cluster.colocate.{i}", f"names the role {role!r}; there are {', '.join(known)}")
    named = [role for group in cluster.colocate or [] for role in group]
    for role in sorted({role for role in named if named.count(role) > 1}):
        yield Problem("cluster.colocate", f"names {role} more than once; a role lives in one group of processes")
    yield from gpus_apart(roles)
    if cluster.workers == "inline" and any(role.ranks > 1 for role in roles):
        yield Problem("cluster.ranks", "inline workers are one rank each; use cluster.workers: process for more")


def _nodes(cluster: ClusterSection, roles: Roles) -> Iterator[Problem]:
    known = roles.known
    for key in ("placement", "resources"):
        for role in getattr(cluster, key):
            if role not in known:
                yield Problem(f"cluster.{key}.{role}", f"there is no such role; there are {', '.join(known)}")
        if getattr(cluster, key) and not joins(cluster):
            yield Problem(f"cluster.{key}", "there is one node alone: this is for a cluster to join; see address")
    if cluster.address and cluster.launcher == LOCAL:
        yield Problem("cluster.address", f"is for a cluster to join, and cluster.launcher is {cluster.launcher}")
    for role, amounts in cluster.resources.items():
        for name, amount in amounts.items():
            if not 0 < amount < math.inf or name in ("CPU", "GPU", "memory"):
                where = f"cluster.resources.{role}.{name}"
                yield Problem(where, f"is {amount:g}, wanted a number above 0 of a custom resource; GPUs: cluster.gpus")
    for group in roles.sharing:
        if len({cluster.placement[role] for role in group if role in cluster.placement}) > 1:
            yield Problem("cluster.placement", f"differs between {' and '.join(group)}, which share their processes")
