"""Loads a config: class default < `extends:` file < file < `key.path=value`; then structure and the plugins' checks."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, fields, frozen

from whet.component import Problem
from whet.config.document import Document, read_file, read_mapping
from whet.config.messages import found_words
from whet.config.renamed import renewed
from whet.config.sections import Config
from whet.config.structure import structure
from whet.errors import ConfigError, PluginError
from whet.plan.layers import Layer, in_full, laid_over, merged, placing, read_override, stages
from whet.plugins.catalog import catalog
from whet.plugins.endpoints import missing_endpoints
from whet.plugins.registry import Registry, load_plugins

ConfigSource = str | Path | Mapping[str, Any]
"""The path of a config file, or the sections themselves, whose paths are relative to the working directory."""


@frozen
class Loaded:
    """A config that holds, and what it came from."""

    config: Config
    registry: Registry
    document: dict[str, Any]
    """The file with what it extends and the overrides, before any default."""
    layers: tuple[Layer, ...]
    """The layers of the document, the weakest first."""


def load_config(source: ConfigSource, overrides: Sequence[str] = (), registry: Registry | None = None) -> Loaded:
    """Load a config. Raises `ConfigError` with every problem of file, overrides and structure, a line each.

    `overrides` are `key.path=value` with YAML values; an index stands for an item of a list. Without a registry the
    installed plugins are loaded; the files under `plugins:` are added to it either way. Old keys and values are
    refused, except in the `config.yaml` of a run folder, which an earlier version may have written.
    """
    if not isinstance(source, str | os.PathLike | Mapping):
        raise ConfigError(f"wanted the path of a config file or a mapping of its sections, found {found_words(source)}")
    path, given = (Path("<config>"), source) if isinstance(source, Mapping) else (Path(source), None)
    layers, problems = _read_chain(path, (), "", given)
    registry = load_plugins() if registry is None else registry
    if path.name == "config.yaml" and path.with_name("identity.json").is_file():
        layers = [_with_names_of_today(layer, registry) for layer in layers]
    for override in overrides:
        try:
            layers.append(read_override(override))
        except ConfigError as error:
            problems.extend(error.problems)
    document, laid = dict[str, Any](), list[Layer]()
    for layer in layers:
        try:
            document = laid_over(document, layer)
            laid.append(layer)
        except ConfigError as error:
            problems.extend(f"command line: {problem}" for problem in error.problems)
    _locate_plugins(document, path)
    wrong = list(_load_files(document.get("plugins"), registry))
    for alike in list(_likenesses(document, registry)):
        laid.insert(0, alike)
        role = merged(alike.document.value, document["roles"][alike.under[1]])
        document = laid_over(document, evolve(alike, document=Document(role)))
    with placing(laid, problems):
        try:
            config = structure(document, Config, registry, also=["extends"])
        except ConfigError as error:
            raise ConfigError([*wrong, *error.problems], _remedy(registry.wanted)) from None
        if wrong:
            raise ConfigError(wrong)
    if problems:
        raise ConfigError(problems)
    with placing(laid):
        found = registry.problems(config)
        if config.endpoint.serve and (missing := missing_endpoints(registry)):
            found.append(Problem("endpoint.serve", f"is true; {missing}"))
        if found:
            raise ConfigError([str(problem) for problem in found])
    return Loaded(config, registry, document, tuple(laid))


def _with_names_of_today(layer: Layer, registry: Registry) -> Layer:
    """Return the config of a run with the keys and values of today; one that does not hold stays as it is."""
    value = layer.document.value
    if list(_load_files(value.get("plugins"), registry)):
        return layer
    try:
        config = structure(value, Config, registry, also=["extends"], renew=True)
    except ConfigError:
        return layer
    return evolve(layer, document=evolve(layer.document, value=renewed(value, config)))


def _remedy(wanted: Sequence[str]) -> str:
    """Return the one command that installs all that a config uses and is not here, where it uses several."""
    missing = list(dict.fromkeys(wanted))
    if len(missing) < 2:
        return ""
    return f"all that is not installed: {catalog().command(missing)}"


def _likenesses(document: dict[str, Any], registry: Registry) -> Iterator[Layer]:
    """Return the keys that roles take over from the section of backend or generator, as layers below all others."""
    roles = document.get("roles")
    for name, role in roles.items() if isinstance(roles, dict) else ():
        like = role.get("like") if isinstance(role, dict) else None
        if like in ("backend", "generator") and (section := document.get(like)) is not None:
            value = _shareable(in_full(section), f"{like}s", registry, own_model=bool(role.get("model")))
            yield Layer("extends", f"roles.{name}.like: {like}", Document(value), ("roles", name))


def _shareable(section: Any, kind: Any, registry: Registry, own_model: bool) -> Any:
    """Return what a role takes over: all that is neither of the policy alone nor, with `own_model`, of its weights."""
    use = section.get("use") if isinstance(section, dict) else None
    try:
        component = registry.find(kind, str(use)).component
    except PluginError:
        return section  # it is refused when it is structured
    known = {field.alias: field.metadata for field in fields(component.config)}
    kept = {key: value for key, value in section.items() if not known.get(key, {}).get("policy")}
    others = {key: one["other_models"] for key, one in known.items() if kept.get(key) and "other_models" in one}
    return merged(kept, others) if own_model else kept


def load_files_of(path: str | Path, registry: Registry) -> list[str]:
    """Load the single-file plugins that a config names, whatever else is in it; give what is wrong with them."""
    *_, (_, document) = stages(_read_chain(Path(path), (), "")[0])
    return list(_load_files(document.get("plugins"), registry))


def _read_chain(
    path: Path, children: tuple[Path, ...], named: str, given: Mapping[str, Any] | None = None
) -> tuple[list[Layer], list[str]]:
    """Read a file and what it extends, the weakest first.

    `children` are the files that led here, and `named` is the file and line that names this one. What is `given` is
    taken in the place of the file.
    """
    try:
        document = read_file(path) if given is None else read_mapping(given, str(path))
    except ConfigError as error:
        raise ConfigError(f"{named}: extends: {error}" if named else str(error)) from None
    value, problems = {} if document.value is None else document.value, list(document.problems)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: wanted a mapping of sections such as `run:`, found {found_words(value)}")
    _locate_plugins(value, path)
    layer = Layer("extends" if children else "file", str(path), evolve(document, value=value))
    if "extends" not in value:
        return [layer], problems
    line = document.line(("extends",))
    extends, here = value.pop("extends"), f"{path}:{line}" if line else str(path)
    if not isinstance(extends, str):
        raise ConfigError(f"{here}: extends: wanted the path of a config file, found {found_words(extends)}")
    chain = (*children, path)
    parent = path.parent / extends
    if os.path.abspath(parent) in map(os.path.abspath, chain):
        circle = " -> ".join(map(str, (*chain, parent)))
        raise ConfigError(f"{here}: extends: the files extend each other in a circle: {circle}")
    base, base_problems = _read_chain(parent, chain, here)
    return [*base, layer], base_problems + problems


def _locate_plugins(document: dict[str, Any], path: Path) -> None:
    """Make the paths under `plugins:` absolute: they are relative to the file that names them."""
    files = document.get("plugins")
    if isinstance(files, list):
        document["plugins"] = [os.path.abspath(path.parent / file) if isinstance(file, str) else file for file in files]


def _load_files(files: object, registry: Registry) -> Iterable[str]:
    """Load single-file plugins. A config names them because it needs them, so a broken one is a problem."""
    if not isinstance(files, list):
        return
    for index, file in enumerate(files):
        if not isinstance(file, str):
            continue
        if not os.path.isfile(file):
            yield f"plugins.{index}: there is no file {file!r}"
            continue
        registry.load_file(Path(file))
        source = str(Path(file).resolve())
        yield from (f"plugins.{index}: {broken}" for broken in registry.broken if broken.distribution == source)
