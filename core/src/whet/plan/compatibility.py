"""Checks whether parts fit each other, from facts: algorithm, loss, advantages, filters, models, inputs, cluster."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.component import (
    AdvantagesFacts,
    AlgorithmFacts,
    EnvironmentFacts,
    FilterFacts,
    GeneratorFacts,
    LossFacts,
    Problem,
    RoleNeed,
)  # fmt: skip
from whet.config.cluster import ClusterSection
from whet.config.sections import Config, DataSection, EnvironmentSection, RoleSection, RolloutSection, RunSection
from whet.data.model_info import ModelInfo
from whet.plan.evaluation import evaluation_problems, keep_best_problems
from whet.plan.placement import gpus_apart, joins
from whet.plan.roles import Roles
from whet.plugins.features import APART
from whet.plugins.launchers import LOCAL
from whet.rollout.routing import idle_step

LOSS, ADVANTAGES = "algorithm.loss", "algorithm.advantages"
ALWAYS = frozenset({"tokens", "loss_mask", "lengths", "prompt_lengths", "group", "episode", "unit"})
"""Columns of every batch."""
ROLLOUT = frozenset({"sampler_logprobs", "version", "temperature", "env", "reward", "stopped"})
"""Columns of a batch from rollouts."""

DEFAULT_SPLIT = {"environments": "train", "evaluation.environments": "test"}
"""The split of an environment that states none, by the section that lists it."""

_PLAYED = "is of training, and evaluation plays all tasks; leave it out"
ELSEWHERE: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "environments": {
        "limit": (0, "is of evaluation, and training plays all tasks of the split; leave it out, or make it smaller"),
        "samples": (1, "is of evaluation; state `group_size`"),
    },
    "evaluation.environments": {
        "group_size": (0, "is of training; state `samples`"), "weight": (1, _PLAYED), "weight_schedule": ({}, _PLAYED)
    },
}  # fmt: skip
"""By section, keys of an environment that it does not read: their defaults, and what is wrong with other values."""


def config_problems(
    config: Config, model: ModelInfo, roles: Roles, feeds_on: str, models: Mapping[str, ModelInfo]
) -> Iterator[Problem]:
    """Find everything in a config that does not go together. `models` are the models of roles that have their own."""
    name, evaluation = config.algorithm.name, config.evaluation
    yield from _inputs(name, config.environments, config.data, roles, feeds_on)
    if evaluation.environments and config.generator is None:
        yield Problem("generator", "evaluation needs a generator; choose one by `use:`")
    yield from evaluation_problems(evaluation, config.environments, roles.of(EnvironmentFacts))
    yield from keep_best_problems(config)
    if config.endpoint.serve and config.generator is None:
        yield Problem("endpoint.serve", "needs a generator; choose one by `use:`")
    for where, entries in ("environments", config.environments), ("evaluation.environments", evaluation.environments):
        yield from _entries(where, entries, roles)
    yield from _epochs(config.run, config.data, name, roles.algorithm, feeds_on)
    yield from _needs(name, config.roles, roles)
    yield from _losses(roles, feeds_on)
    yield from _weights(name, roles, feeds_on)
    yield from incompatibilities(name, roles)
    yield from _lengths(config, model, roles)
    yield from _conversations(config.rollout, model, roles, models)
    yield from _shares(config.cluster, roles)
    yield from _updates(config.rollout, config.cluster.workers, roles)


def incompatibilities(name: str, roles: Roles) -> Iterator[Problem]:
    """Find what does not go together although each part is right by itself. `name` is the algorithm's."""
    algorithm, loss, advantages = roles.algorithm, roles.of(LossFacts).get(LOSS), roles.of(AdvantagesFacts)
    essential = algorithm.columns_essential
    if loss is not None and essential and not essential & loss.columns_read:
        wanted = " or ".join(repr(column) for column in sorted(essential))
        yield Problem(LOSS, f"reads no {wanted}, so nothing that {name} finds out would reach it")
    givers = ["algorithm"] if algorithm.token_advantages else []
    givers += [ADVANTAGES] if ADVANTAGES in advantages and advantages[ADVANTAGES].token_advantages else []
    if givers and loss is not None and not loss.token_advantages:
        words = f"wants one advantage for each sequence; as configured, {givers[-1]} gives each token its own"
        yield Problem(LOSS, words)
    for path, found in roles.of(FilterFacts).items():
        if algorithm.group_size is not None and found.least_group_size > algorithm.group_size:
            least, size = found.least_group_size, algorithm.group_size
            yield Problem(path, f"compares at least {least} samples of one task, and algorithm.group_size is {size}")


def _inputs(
    name: str, environments: Sequence[EnvironmentSection], data: DataSection | None, roles: Roles, feeds_on: str
) -> Iterator[Problem]:
    """Find inputs that the algorithm needs and does not have, or has and does not read."""
    if feeds_on == "rollouts":
        if not environments:
            yield Problem("environments", f"{name} is fed by rollouts and there is no environment; list at least one")
        elif (step := idle_step([entry.weights for entry in environments])) is not None:
            yield Problem("environments", f"none has a weight above 0 after step {step}; raise one's `weight`")
        if "generator" not in roles.names:
            yield Problem("generator", f"{name} is fed by rollouts and there is no generator; choose one by `use:`")
        if data is not None:
            yield Problem("data", f"{name} is fed by rollouts and reads no data files; remove this section")
    else:
        if data is None or not data.train:
            yield Problem("data", f"{name} trains on data files and there are none; list them under data.train")
        if environments:
            yield Problem("environments", f"{name} trains on data files; environments belong under evaluation")


def _entries(where: str, entries: Sequence[EnvironmentSection], roles: Roles) -> Iterator[Problem]:
    """Find environments of one name, splits that an environment's facts do not name, and samples that do not differ."""
    names, facts = [entry.name or entry.component.name for entry in entries], roles.of(EnvironmentFacts)
    least, by = max(((found.least_group_size, path) for path, found in roles.of(FilterFacts).items()), default=(1, ""))
    for i, (entry, name) in enumerate(zip(entries, names, strict=True)):
        if name in names[:i]:
            yield Problem(f"{where}.{i}.name", f"there are two environments named {name!r}; give one another name")
        split, known = entry.split or DEFAULT_SPLIT[where], facts.get(f"{where}.{i}", EnvironmentFacts()).splits
        if known is not None and split not in known:
            yield Problem(f"{where}.{i}.split", f"there is no split {split!r}; there are {', '.join(known)}")
        if entry.worker is not None and (missing := APART.missing()):
            yield Problem(f"{where}.{i}.worker", f"is given; {missing}")
        if where == "environments" and entry.sampling.temperature == 0:
            yield Problem(
                f"{where}.{i}.sampling.temperature", "is 0, so all samples would be equal; wanted more than 0"
            )
        for key, (default, words) in ELSEWHERE[where].items():
            if getattr(entry, key) != default:
                yield Problem(f"{where}.{i}.{key}", words)
        if where == "environments" and 0 < entry.group_size < least:
            yield Problem(f"{where}.{i}.group_size", f"is {entry.group_size}, and {by} compares at least {least}")


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


def _needs(algorithm: str, given: Mapping[str, RoleSection], roles: Roles) -> Iterator[Problem]:
    """Find further models that are missing, and models that no component asks for."""
    needs = roles.needs
    for name, need in needs.items():
        if name not in given:
            wanted = f", with the output {', '.join(sorted(need.outputs))}" if need.outputs else ""
            wanted = ", for responses: `use:` a generator" if need.generates else wanted
            yield Problem(f"roles.{name}", f"is missing: {algorithm} or an environment asks for it{wanted}")
            continue
        if roles.algorithm.roles.get(name, RoleNeed()).generates:
            yield Problem("algorithm", f"asks the role {name} for responses, which only an environment can do")
            continue
        role, outputs = roles[name], roles.outputs_of(name)
        if need.generates != role.generates:
            words = "a generator: it is to write responses" if need.generates else "a backend: it computes outputs"
            yield Problem(f"roles.{name}", f"must be {words}, and {role.selection.name} is none; change `use:`")
            continue
        if role.sync_every and (given[name].model is not None or not role.generates):
            why = "the role has a model of its own" if role.generates else f"{role.selection.name} is no generator"
            yield Problem(f"roles.{name}.sync_every", f"is {role.sync_every}, but {why}; remove one of the two")
        for output in sorted(need.outputs - outputs):
            words = f"must give the model output {output!r}; it gives {', '.join(sorted(outputs))}"
            yield Problem(f"roles.{name}", words)
    for name in given:
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


def _weights(name: str, roles: Roles, feeds_on: str) -> Iterator[Problem]:
    """Find sets of weights and columns that nobody gives: the backend holds weights, the generator records columns."""
    sampled = feeds_on == "rollouts" and "generator" in roles.names
    generator = roles.of(GeneratorFacts).get("generator", GeneratorFacts())
    for column in sorted(roles.backend.columns_wanted - (generator.columns_given if sampled else frozenset())):
        why = f"the generator {roles['generator'].selection.name} cannot record it" if sampled else "data has none"
        yield Problem("backend", f"wants the column {column!r} of a generator, and {why}")
    selection = roles["backend"].selection
    for weights in sorted(roles.algorithm.weights_needed - roles.backend.weights_given):
        why = f"{name} scores with the weights {weights!r}, and the backend {selection.name} holds no such copy"
        if hasattr(selection.config, weights):
            is_switch = getattr(selection.config, weights) is False
            yield Problem(f"backend.{weights}", f"{why}; set it{' to true' if is_switch else ''}")
        else:
            yield Problem("backend", f"{why} and has no key {weights!r} for one; choose another backend")


def _lengths(config: Config, model: ModelInfo, roles: Roles) -> Iterator[Problem]:
    rollout, positions = config.rollout, model.max_positions
    for path, length in {
        "rollout.max_context": rollout.max_context, "data.max_length": config.data.max_length if config.data else 0
    }.items():  # fmt: skip
        if positions and length > positions:
            yield Problem(path, f"is {length}, but the model's positions end at {positions}")
    limit = rollout.max_context or positions
    asked = {"rollout.max_tokens": rollout.max_tokens} if "generator" in roles.names else {}
    asked |= {f"{path}.sampling.max_tokens": entry.sampling.max_tokens for path, entry in config.played()}
    for path, tokens in asked.items():
        if limit and tokens >= limit:
            yield Problem(path, f"is {tokens}, which leaves no room for a prompt in {limit} tokens")


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
    elif wanted == "continue" and workers == "process" and "generator" in roles.in_process("backend"):
        yield Problem(
            "rollout.on_weight_update",
            "is continue, but backend and generator take turns in one process, so weights cannot be sent while a "
            "request runs; set them apart by cluster.colocate: []",
        )


def _shares(cluster: ClusterSection, roles: Roles) -> Iterator[Problem]:
    """Find keys of `cluster` that name no role, and roles that cannot be placed as it says."""
    there = f"there are {', '.join(roles.known)}"
    for key in ("python", "ranks", "gpus", "threads", "placement", "resources"):
        for role in getattr(cluster, key):
            if role not in roles.known:
                yield Problem(f"cluster.{key}.{role}", f"there is no such role; {there}")
    for i, group in enumerate(cluster.colocate or []):
        for role in group:
            if role not in roles.known:
                yield Problem(f"cluster.colocate.{i}", f"names the role {role!r}; {there}")
    named = [role for group in cluster.colocate or [] for role in group]
    for role in sorted({role for role in named if named.count(role) > 1}):
        yield Problem("cluster.colocate", f"names {role} more than once; a role lives in one group of processes")
    for name in cluster.python if cluster.workers == "inline" else ():
        if name in roles.known:
            words = "inline workers live in the driver, and in its Python"
            yield Problem(f"cluster.python.{name}", f"{words}; remove this, or choose cluster.workers: process")
    yield from _nodes(cluster, roles)
    yield from gpus_apart(roles)
    for role in roles:
        for problem in role.facts.problems(role.ranks) if role.facts.problems else ():
            yield Problem(f"{role.path}.{problem.path}", problem.message)
    if cluster.workers == "inline" and any(role.ranks > 1 for role in roles):
        yield Problem("cluster.ranks", "inline workers are one rank each; use cluster.workers: process for more")


def _nodes(cluster: ClusterSection, roles: Roles) -> Iterator[Problem]:
    """Find what is said of the nodes of a cluster and cannot be."""
    for key in ("placement", "resources"):
        if getattr(cluster, key) and not joins(cluster):
            yield Problem(f"cluster.{key}", "there is one node alone: this is for a cluster to join; see address")
    if cluster.address and cluster.launcher == LOCAL:
        yield Problem("cluster.address", f"is for a cluster to join, and cluster.launcher is {cluster.launcher}")
    for role, amounts in cluster.resources.items():
        for name, amount in amounts.items():
            if name in ("CPU", "GPU", "memory"):
                where = f"cluster.resources.{role}.{name}"
                yield Problem(where, f"is {amount:g}, wanted a number above 0 of a custom resource; GPUs: cluster.gpus")
    for group in roles.sharing:
        if len({cluster.placement[role] for role in group if role in cluster.placement}) > 1:
            yield Problem("cluster.placement", f"differs between {' and '.join(group)}, which share their devices")
