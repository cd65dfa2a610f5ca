"""How far anyone can go without resources: a config, what is wrong with it, and its plan."""

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from whet.cluster.process import extra_folders
from whet.component import Facts, Package, Problem
from whet.config.evaluation import evaluation_notes, with_answers
from whet.config.load import Loaded, load_config
from whet.errors import ConfigError, DataError
from whet.interpreters import Interpreter, faults, find, located, normal, probe, versions
from whet.machine import gpu_count, usable_cores, without_ray
from whet.model import ModelInfo, check_weights, locate, read_model
from whet.placement import Machine, joins
from whet.plan import Plan, gather_facts, make_plan, selections
from whet.roles import role_names, role_path
from whet.spans import Span

if TYPE_CHECKING:
    from whet.config.sections import Config, DataFile, ModelSection
    from whet.plugins import Registry


@frozen
class Prepared:
    """A config with its plan; nothing has been claimed."""

    loaded: Loaded
    model: ModelInfo
    plan: Plan
    models: Mapping[str, ModelInfo] = field(factory=dict)
    """Of roles that have a model of their own."""
    facts: Mapping[str, Facts] = field(factory=dict)
    """Of every chosen component, by path into the config."""
    interpreters: Mapping[str, Interpreter] = field(factory=dict)
    """Of roles that do not run in the driver's, as far as this machine has them."""
    spans: tuple[Span, ...] = field(default=(), eq=False)
    """What it took to get here."""

    @property
    def config(self) -> "Config":
        """The structured config."""
        return self.loaded.config

    def refuse_elsewhere(self) -> None:
        """Raise `ConfigError` where another machine might run it, and this one cannot."""
        if self.plan.warnings:
            raise ConfigError(list(self.plan.warnings))


def prepare(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    config_only: bool = True,
    trains: bool = True,
    registry: "Registry | None" = None,
    began: float | None = None,
) -> Prepared:
    """Go as far as anyone can without resources: structure, problems, plan. Imports no torch.

    `config_only` leaves weights that are on the hub there; without `trains` the data files need not be here. Without a
    registry the installed plugins are loaded. `began`, in seconds since the epoch, is when all this was asked for.
    """
    now = time.time()
    began = now if began is None else began
    loaded = load_config(path, overrides, registry)
    model = _model(loaded.config.model, config_only)
    models = {
        name: _model(role.model, config_only, f"roles.{name}.")
        for name, role in loaded.config.roles.items() if role.model is not None
    }  # fmt: skip
    facts = with_answers(loaded.config, gather_facts(loaded.config, model, models))
    plan, problems = make_plan(loaded.config, model, facts, machine(), models)
    problems += missing_launcher(loaded.config)
    interpreters, unfit = find_interpreters(loaded.config, facts)
    problems += unfit
    if trains:
        problems += data_problems(loaded.config, facts["algorithm"].record_fields)
    if plan is None or problems:
        raise ConfigError([str(problem) for problem in problems])
    notes = (*evaluation_notes(loaded.config, facts), *_packages(facts, interpreters))
    plan = evolve(plan, notes=(*plan.notes, *notes), warnings=tuple(_not_here(loaded.config, facts)))
    spans = (Span("run", "load plugins", began, now - began), Span("run", "config", now, time.time() - now))
    return Prepared(loaded, model, plan, models, facts, interpreters, spans)


def _model(section: "ModelSection", config_only: bool, where: str = "") -> ModelInfo:
    """Find and read the model of a section; `where` leads to it."""
    try:
        folder = locate(section.path, section.revision, config_only=config_only, code=section.trust_remote_code)
        model = read_model(folder, section.dtype, section.trust_remote_code)
        if section.chat_template is not None:
            model = evolve(model, chat_template=_template(section.chat_template))
        if not config_only:
            check_weights(folder)
    except ConfigError as error:
        raise ConfigError([f"{where}{problem}" for problem in error.problems]) from error
    return model


def _template(given: str) -> str:
    """Read a chat template that a config names."""
    from whet.data.chat import given_template

    try:
        return given_template(given)
    except DataError as error:
        raise ConfigError(str(error)) from error


def missing_launcher(config: "Config") -> list[Problem]:
    """Look whether what starts the processes is installed; nothing is imported."""
    needed = config.cluster.launcher == "ray" and config.cluster.workers != "inline"
    return [Problem("cluster.launcher", words)] if needed and (words := without_ray()) else []


def find_interpreters(
    config: "Config", facts: Mapping[str, Facts]
) -> tuple[dict[str, Interpreter], list[Problem]]:  # fmt: skip
    """Look into the Pythons of roles that do not run in the driver's, and say why their workers could not run there.

    On a cluster of other machines those that are not here are left to the nodes.
    """
    found, problems = dict[str, Interpreter](), list[Problem]()
    roles = role_names(config) if config.cluster.workers == "process" else []
    for role, named in config.cluster.python.items():
        if role not in roles or (joins(config) and not located(named).exists()):
            continue
        modules, distributions = _wanted(config, facts, role)
        packages = facts[role_path(role)].packages
        offering = [name for package in packages for name in package.distributions]
        try:
            found[role] = probe(find(named), modules, [*distributions, *offering], extra_folders())
            words = faults(found[role], distributions, packages)
        except ConfigError as error:
            words = error.problems
        problems += [Problem(f"cluster.python.{role}", one) for one in words]
    return found, problems


def _wanted(config: "Config", facts: Mapping[str, Facts], role: str) -> tuple[list[str], dict[str, str]]:
    """Give the modules that a role's workers import, and who offers them with the versions that the driver has."""
    own = role_path(role)
    parts = [
        selection for path, selection in selections(config)
        if path == own or (selection.kind == "losses" and facts[path].role == role)
    ]  # fmt: skip
    targets = [selection.component.target for selection in parts]
    modules = [target.partition(":")[0] for target in targets if not target.startswith("file:")]
    held = versions(selection.distribution for selection in parts)
    distributions = {name: held[normal(name)] for s in parts if normal(name := s.distribution) in held}
    return [*modules, *facts[own].imports, *(package.module for package in facts[own].packages)], distributions


def packages_here(config: "Config", facts: Mapping[str, Facts]) -> Iterator[tuple[str, Package]]:
    """Give each role with what its workers will look for in this very interpreter, as far as that can be known."""
    for role in () if joins(config) else role_names(config):
        if config.cluster.workers == "inline" or role not in config.cluster.python:
            yield from ((role, package) for package in facts[role_path(role)].packages)


def _packages(facts: Mapping[str, Facts], interpreters: Mapping[str, Interpreter]) -> Iterator[str]:
    """Say what a role's own Python has of what its workers stand on."""
    for role, found in interpreters.items():
        for package in facts[role_path(role)].packages:
            yield f"{role}: {package.name} {package.version(found.versions)} of {found.executable}".replace("  ", " ")


def _not_here(config: "Config", facts: Mapping[str, Facts]) -> Iterator[str]:
    """Say what workers stand on that this Python does not have."""
    for role, package in packages_here(config, facts):
        if not package.is_here:
            yield f"{role}: {sys.executable} has no {package.name}, which its workers stand on; {package.install}"


def data_problems(config: "Config", fields: Sequence[Sequence[str]] = ()) -> list[Problem]:
    """Look at the data files that a config names, and at their first records; what is on the hub is left to the run.

    `fields`: see `Facts.record_fields`.
    """
    problems = []
    for name, files in (("train", config.data.train), ("validation", config.data.validation)) if config.data else ():
        for i, file in enumerate(files):
            if message := _unusable(file, fields):
                problems.append(Problem(f"data.{name}.{i}.path", message))
    return problems


FIRST_RECORDS = 20
"""Records of a data file that are looked at. A run may leave some out, but not all."""


def _unusable(file: "DataFile", fields: Sequence[Sequence[str]]) -> str:
    """Say why nothing of a data file can be used, as far as its beginning tells."""
    from whet.data.readers import find_file, read

    try:
        found = find_file(file)
        if found is None:
            return ""
        if not found.is_file():
            return f"there is no file {file.path!r}"
        rows = list(itertools.islice(read(file), FIRST_RECORDS))
    except DataError as error:
        return str(error)
    reasons = [row.problem or _lacking(row.record, fields) for row in rows]
    if not rows:
        return f"{file.path!r} holds no record"
    if not all(reasons):
        return ""
    return f"none of the first {len(rows)} records can be used; {rows[0].where}: {reasons[0]}"


def _lacking(record: Mapping[str, Any], fields: Sequence[Sequence[str]]) -> str:
    """Say which fields a record lacks."""
    if not fields or any(all(record.get(name) is not None for name in names) for names in fields):
        return ""
    wanted = ", or ".join(" and ".join(f"`{name}`" for name in names) for names in fields)
    return f"it has the fields {', '.join(record) or 'none'}; wanted {wanted}"


def machine() -> Machine:
    """Look at this machine without torch. A container's share of the processor counts, not the cores around it."""
    return Machine(usable_cores(), gpu_count())
