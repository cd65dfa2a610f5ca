"""Loads and plans a config without resources: no worker, no GPU, no torch.

config file -> Loaded -> models, facts, roles -> Plan, interpreters, data files -> Prepared, or every problem at once
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from attrs import evolve, field, fields, frozen

from whet.component import AlgorithmFacts, EnvironmentFacts, LossFacts, Package, Problem, Selection, resolve
from whet.data.model_info import ModelInfo, check_weights, locate, read_model
from whet.data.spans import Span
from whet.errors import ConfigError, DataError
from whet.installed import normal
from whet.plan.evaluation import evaluation_notes, keep_best_notes
from whet.plan.layers import placed, placing
from whet.plan.load import ConfigSource, Loaded, load_config
from whet.plan.machine import gpu_count, gpu_memory, total_memory, usable_cores
from whet.plan.memory import memory_problems, rooms
from whet.plan.placement import Machine, joins
from whet.plan.plan import Plan, gather_facts, make_plan
from whet.plan.roles import Roles, make_roles
from whet.plugins.features import CHAT, PROBE, READER, chats, forecasting, reader
from whet.plugins.launchers import LOCAL, missing_launcher
from whet.runtime.interpreters import Interpreter, faults, find, located, probe, versions
from whet.runtime.process import extra_folders

if TYPE_CHECKING:
    from whet.config.cluster import ClusterSection
    from whet.config.sections import Config, DataSection, ModelSection, ProbeSection, RoleSection
    from whet.interfaces.data import Encode
    from whet.plugins.registry import Registry


OWN = (
    "config.yaml", "identity.json", "versions.json", "plan.json", "journal.jsonl", "metrics.jsonl", "histograms.jsonl",
    "spans.jsonl", ".lock", "rollouts", "evaluations", "tables", "checkpoints", "model", "logs", "scratch",
    "endpoint.json", "endpoint.jsonl",
)  # fmt: skip
"""What a run writes in its folder."""
WRITTEN_LATE = ("metrics.jsonl", "histograms.jsonl", "rollouts", "evaluations", "tables", "model")
"""Of these, what a run writes after its journal has begun. A checkpoint is known by what is in it."""


@frozen
class Prepared:
    """A config with its plan. Nothing is started, and the run folder is not locked."""

    loaded: Loaded
    model: ModelInfo
    plan: Plan
    roles: Roles
    """The roles, with the facts of every chosen component."""
    models: Mapping[str, ModelInfo] = field(factory=dict)
    """The models of roles that have one of their own."""
    machine: Machine = field(factory=lambda: Machine(1))
    """The machine of the plan."""
    interpreters: Mapping[str, Interpreter] = field(factory=dict)
    """The Python interpreters of roles that do not run in the driver's, as far as this machine has them."""
    spans: tuple[Span, ...] = field(default=(), eq=False)
    """The time that loading and planning took."""

    @property
    def config(self) -> "Config":
        """Return the structured config."""
        return self.loaded.config

    def refuse_elsewhere(self, *only: str) -> None:
        """Raise `ConfigError` where another machine might run it, and this one cannot.

        Where `only` some roles are started, their memory alone counts.
        """
        plan, cluster = self.plan, self.config.cluster
        refusals = plan.refusals
        if only:
            some, table = [plan.role(name) for name in only], self.roles
            found = rooms(cluster, table, some, plan.turns, self.machine)
            refusals = placed(map(str, memory_problems(cluster, found, self.machine, table, some)), self.loaded.layers)
        if problems := [*dict.fromkeys((*plan.warnings, *refusals))]:
            raise ConfigError(problems)


def prepare(
    source: ConfigSource, overrides: Sequence[str] = (), *, config_only: bool = True, trains: bool = True,
    registry: "Registry | None" = None, began: float | None = None, target: Machine | None = None,
) -> Prepared:  # fmt: skip
    """Load a config and plan its run. Raises `ConfigError` with all problems. Imports no torch.

    The plan is for the machine `target`, which need not be here, or else for this one.

    `config_only` leaves weights that are on the hub there; without `trains` the data files need not be here. Without a
    registry the installed plugins are loaded. `began`, in seconds since the epoch, is when all this was asked for.
    """
    now = time.time()
    loaded, target = load_config(source, overrides, registry), target or machine()
    cluster = loaded.config.cluster
    if target.others and cluster.launcher != LOCAL and not joins(cluster):
        # The nodes that are described are the cluster to join, where the config does not name one yet.
        loaded = evolve(loaded, config=evolve(loaded.config, cluster=evolve(cluster, address="auto")))
    with placing(loaded.layers):
        prepared = _plan(loaded, target, config_only, trains)
    began = now if began is None else began
    spans = (Span("run", "load plugins", began, now - began), Span("run", "config", now, time.time() - now))
    return evolve(prepared, spans=spans)


def _plan(loaded: Loaded, target: Machine, config_only: bool, trains: bool) -> Prepared:
    """Return a config with its plan. Raises `ConfigError` with all problems of both."""
    config, cluster = loaded.config, loaded.config.cluster
    model, models = find_models(config.model, config.roles)
    roles = make_roles(config, gather_facts(config, model, models))
    plan, problems = make_plan(config, model, roles, target, models, trains)
    problems += [*missing_launcher(cluster), *_no_chat()]
    interpreters, unfit = find_interpreters(cluster, roles)
    problems += unfit
    recognised = list[str]()
    if trains:
        names = field_names(config.algorithm)
        found, recognised = look_at_data(config.data, roles.algorithm.record_fields, names)
        problems += [*found, *_unchecked(config.weight_sync.probe, roles)]
    folder = Path(config.run.folder).expanduser().absolute()
    if trains:  # other jobs have no loggers, and a folder of their own
        problems += [*_taken(folder, roles.selections), *_foreign(config.run.folder)]
    if plan is None or problems:
        raise ConfigError([str(problem) for problem in problems])
    notes = [*evaluation_notes(config.evaluation, roles.of(EnvironmentFacts)), *_packages(roles, interpreters)]
    notes += [*_unsaid(cluster, target, roles), *_outside(folder, roles.selections), *recognised]
    notes += keep_best_notes(config.run, config.evaluation, getattr(config.algorithm.config, "validate_every", 0))
    plan = evolve(
        plan, notes=(*plan.notes, *notes), refusals=placed(plan.refusals, loaded.layers),
        warnings=placed((*plan.warnings, *_not_here(cluster, roles)), loaded.layers),
    )  # fmt: skip
    if (forecasts := forecasting()) is not None:
        plan = evolve(plan, peaks=forecasts.known_peaks(config, roles, plan))
    if not config_only and not (trains and plan.refusals):  # weights for a run that cannot be are not fetched
        model, models = find_models(config.model, config.roles, config_only=False)
    return Prepared(loaded, model, plan, roles, models, target, interpreters)


def _no_chat() -> Iterator[Problem]:
    """Yield a problem where nothing that is installed can tokenise conversations."""
    if missing := CHAT.missing():
        yield Problem("model", f"is given, and nothing here tokenises conversations for it; {missing}")


def _unchecked(section: "ProbeSection", roles: Roles) -> Iterator[Problem]:
    """Yield a problem where weight syncs are to be checked and nothing that is installed can check them."""
    wanted = section.every and "generator" in roles.names and "logprobs" in roles.backend.outputs_given
    if wanted and (missing := PROBE.missing()):
        yield Problem("weight_sync.probe.every", f"is {section.every}; {missing}, or set 0 to run without checks")


def _unsaid(cluster: "ClusterSection", target: Machine, roles: Roles) -> Iterator[str]:
    """Return notes on GPUs that nobody uses, and on what is not known of a machine that is described."""
    if not any(cluster.gpus.values()) and any(node.gpus for node in target.nodes):
        names = ", ".join(roles.names)
        yield f"no role computes on a GPU, and there are some; state cluster.gpus, the number for each of: {names}"
    if not target.given:
        return
    if target.others and not joins(cluster):
        launcher = cluster.launcher
        yield f"only the first of the {len(target.nodes)} machines is used, as cluster.launcher is {launcher}"
    if not all(node.cores for node in target.nodes):
        yield "cores of the machine are not known, so each rank has 1 thread; `--machine ...,cores=N` tells them"
    if not all(node.memory_bytes for node in target.nodes):
        yield "the host's memory is not known, and not checked; `--machine ...,memory=SIZE` tells it"


def find_models(
    section: "ModelSection", roles: "Mapping[str, RoleSection]", *, config_only: bool = True
) -> tuple[ModelInfo, dict[str, ModelInfo]]:
    """Find and read the model, and the models of roles with their own."""
    own = {name: role.model for name, role in roles.items() if role.model is not None}
    found = {name: _find_model(model, config_only, f"roles.{name}.") for name, model in own.items()}
    return _find_model(section, config_only), found


def _find_model(section: "ModelSection", config_only: bool, where: str = "") -> ModelInfo:
    """Find and read the model of a section; `where` leads to it."""
    try:
        folder = locate(section.path, section.revision, config_only=config_only, code=section.trust_remote_code)
        model = read_model(folder, section.dtype, section.trust_remote_code)
        if section.chat_template is not None:
            model = evolve(model, chat_template=chats().given_template(section.chat_template))
        if section.template and (folder / "tokenizer.json").is_file():
            _check_arguments(folder, section)
        if not config_only:
            check_weights(folder)
    except ConfigError as error:
        raise ConfigError([f"{where}{problem}" for problem in error.problems]) from error
    except DataError as error:  # of the chat template
        raise ConfigError(f"{where}{error}") from error
    return model


def _check_arguments(folder: Path, section: "ModelSection") -> None:
    """Raise `ConfigError` for arguments that the chat template does not use."""
    try:
        _ = chats().ChatTokenizer(folder, section.chat_template, arguments=section.template).template
    except DataError as error:
        raise ConfigError(f"model.template: {error}") from error


def find_interpreters(cluster: "ClusterSection", roles: Roles) -> tuple[dict[str, Interpreter], list[Problem]]:
    """Return the Pythons of roles that do not run in the driver's, and why their workers could not run there.

    On a cluster of other machines, Pythons that are not here are left to the nodes.
    """
    found, problems = dict[str, Interpreter](), list[Problem]()
    apart = roles.names if cluster.workers == "process" else ()
    for role, named in cluster.python.items():
        if role not in apart or (joins(cluster) and not located(named).exists()):
            continue
        modules, distributions = _wanted(roles, role)
        packages = roles[role].facts.packages
        offering = [name for package in packages for name in package.distributions]
        try:
            found[role] = probe(find(named), modules, [*distributions, *offering], extra_folders())
            words = faults(found[role], distributions, packages)
        except ConfigError as error:
            words = error.problems
        problems += [Problem(f"cluster.python.{role}", one) for one in words]
    return found, problems


def _wanted(roles: Roles, role: str) -> tuple[list[str], dict[str, str]]:
    """Return the modules that a role's workers import, and who offers them with the versions that the driver has."""
    own = roles[role]
    parts = [
        selection for path, selection in roles.selections.items()
        if path == own.path or (isinstance(found := roles.facts[path], LossFacts) and found.role == role)
    ]  # fmt: skip
    targets = [selection.component.target for selection in parts]
    modules = [target.partition(":")[0] for target in targets if not target.startswith("file:")]
    held = versions(selection.distribution for selection in parts)
    distributions = {name: held[normal(name)] for s in parts if normal(name := s.distribution) in held}
    return [*modules, *own.facts.imports, *(package.module for package in own.facts.packages)], distributions


def packages_here(cluster: "ClusterSection", roles: Roles) -> Iterator[tuple[str, Package]]:
    """Return each role with what its workers will look for in this very interpreter, as far as that can be known."""
    for role in () if joins(cluster) else roles:
        if cluster.workers == "inline" or role.name not in cluster.python:
            yield from ((role.name, package) for package in role.facts.packages)


def _packages(roles: Roles, interpreters: Mapping[str, Interpreter]) -> Iterator[str]:
    """Return the versions of the packages that workers need, from the Pythons of their roles."""
    for role, found in interpreters.items():
        for package in roles[role].facts.packages:
            yield f"{role}: {package.name} {package.version(found.versions)} of {found.executable}".replace("  ", " ")


def _written(folder: Path, selections: Mapping[str, Selection]) -> Iterator[tuple[str, str, Path, str]]:
    """Yield all that components write: key, component, file or folder, and its place in the run folder."""
    for path, selection in selections.items():
        for field_ in fields(cast(Any, type(selection.config))):
            if field_.metadata.get("writes") and (name := getattr(selection.config, field_.name)) != "-":
                target = os.path.normpath(folder / os.path.expanduser(name))
                inner = os.path.relpath(target, os.path.normpath(folder))
                yield f"{path}.{field_.alias}", selection.name, Path(target), inner


def _taken(folder: Path, selections: Mapping[str, Selection]) -> Iterator[Problem]:
    """Find components that write what the run itself or another component writes."""
    owners = dict[Path, str]()
    for key, _, target, inner in _written(folder, selections):
        owner = owners.setdefault(target, key)
        if inner in (".", *OWN) or (inner.split(os.sep)[0] in OWN and not inner.startswith(f"logs{os.sep}")):
            yield Problem(key, f"{inner!r} is written by the run itself; choose another name")
        elif owner != key:
            yield Problem(key, f"{inner!r} is already written by {owner}; choose another name")


def _foreign(path: str) -> Iterator[Problem]:
    """Yield what is wrong with a run folder: files that no run wrote, a file or a broken link in its place, and `$`."""
    folder = Path(path).expanduser().absolute()
    found = [name for name in WRITTEN_LATE if os.path.exists(folder / name)]  # a run writes its journal first
    if found and not any(os.path.exists(folder / name) for name in ("journal.jsonl", "identity.json")):
        words = f"is {folder}, which holds {', '.join(found)} of something else; choose another folder"
        yield Problem("run.folder", words)
    for one in (folder, *folder.parents):
        if os.path.isfile(one) or (os.path.islink(one) and not os.path.exists(one)):
            what = "a file" if os.path.isfile(one) else "a link to nothing"
            yield Problem("run.folder", f"is {folder}, and {one} is {what}; choose another folder")
    if "$" in path:
        yield Problem("run.folder", f"is {path}; environment variables are not expanded, write the path")


def _outside(folder: Path, selections: Mapping[str, Selection]) -> Iterator[str]:
    """Return which components write to a place outside the run folder."""
    for key, component, target, inner in _written(folder, selections):
        if inner.split(os.sep)[0] == os.pardir:
            yield f"{key}: {component} writes to {target}, outside the run folder {folder}"


def _not_here(cluster: "ClusterSection", roles: Roles) -> Iterator[str]:
    """Return the packages that workers need and this Python does not have."""
    for role, package in packages_here(cluster, roles):
        if not package.is_here:
            yield f"{role}: {sys.executable} has no {package.name}, which its workers stand on; {package.install}"


def look_at_data(
    section: "DataSection | None", fields: Sequence[Sequence[str]] = (), names: Mapping[str, str] | None = None
) -> tuple[list[Problem], list[str]]:
    """Check the data files of a config, and their first records. Data sets on the hub are not read before the run.

    Return what is wrong, and what was recognised, a line for each file. `fields`: see `AlgorithmFacts.record_fields`;
    `names`: see `field_names`.
    """
    if section and (missing := READER.missing()):
        return [Problem("data", f"is given; {missing}")], []
    problems, recognised = list[Problem](), list[str]()
    for name, files in (("train", section.train), ("validation", section.validation)) if section else ():
        for i, file in enumerate(files):
            seen = reader().look(file, fields, names or {})
            if seen.problem:
                problems.append(Problem(f"data.{name}.{i}.path", seen.problem))
            elif seen.recognised:
                recognised.append(f"data.{name}.{i}: {file.path}: {seen.recognised}")
    return problems, recognised


def field_names(algorithm: Selection) -> Mapping[str, str]:
    """Return the names that an algorithm has for the columns of a record, by their usual names."""
    found = getattr(algorithm.config, "fields", None)
    return found if isinstance(found, Mapping) else {}


def encode_of(algorithm: Selection, facts: AlgorithmFacts, model: ModelInfo) -> "Encode | None":
    """Return the function that turns records into sequences; None where the algorithm does not state it."""
    encode: Encode | None = resolve(facts.encode)(algorithm.config, model) if facts.encode else None
    return encode


def machine() -> Machine:
    """Return this machine, without torch. In a container, the cores and the memory of the container count."""
    gpus = gpu_count()
    return Machine(usable_cores(), gpus, total_memory(), gpu_memory(gpus))
