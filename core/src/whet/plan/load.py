"""Loads a config: class default < `extends:` file < file < `key.path=value`; then structure and the plugins' checks."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import evolve, fields, frozen

from whet.component import Problem
from whet.config.document import Document, read_file, read_text
from whet.config.messages import found_words, path_segment
from whet.config.sections import Config
from whet.config.structure import structure
from whet.errors import ConfigError
from whet.plugins.catalog import catalog
from whet.plugins.endpoints import missing_endpoints
from whet.plugins.registry import Registry, load_plugins


@frozen
class Layer:
    """One of the places that set values: a file, or an override."""

    kind: Literal["extends", "file", "override"]
    name: str
    """The path of the file, or the override as it was written."""
    document: Document
    under: tuple[str, ...] = ()
    """The path at which the document stands in the config."""


@frozen
class Loaded:
    """A config that holds, and what it came from."""

    config: Config
    registry: Registry
    document: dict[str, Any]
    """The file with what it extends and the overrides, before any default."""
    path: Path
    layers: tuple[Layer, ...]
    """What the document was put together from, the weakest first."""


def load_config(path: str | Path, overrides: Sequence[str] = (), registry: Registry | None = None) -> Loaded:
    """Load a config file. Raises `ConfigError` with every problem of file, overrides and structure, a line each.

    `overrides` are `key.path=value` with YAML values; an index stands for an item of a list. Without a registry the
    installed plugins are loaded; the files under `plugins:` are added to it either way.
    """
    path = Path(path)
    layers, problems = _read_chain(path, ())
    for override in overrides:
        try:
            layers.append(_read_override(override))
        except ConfigError as error:
            problems.extend(error.problems)
    document, wrong = _laid_out(layers)
    problems.extend(wrong)
    _locate_plugins(document, path)
    registry = load_plugins() if registry is None else registry
    problems.extend(_load_files(document.get("plugins"), registry))
    for alike in list(_likenesses(document, registry)):
        layers.insert(0, alike)
        document = laid_over(document, evolve(alike, document=Document(_role_over(alike, document))))
    try:
        config = structure(document, Config, registry, also=["extends"])
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems], _remedy(registry.wanted)) from None
    if problems:
        raise ConfigError(problems)
    found = registry.problems(config)
    if config.endpoint.serve and (missing := missing_endpoints(registry)):
        found.append(Problem("endpoint.serve", f"is true; {missing}"))
    if found:
        raise ConfigError([str(problem) for problem in found])
    return Loaded(config, registry, document, path, tuple(layers))


def _remedy(wanted: Sequence[str]) -> str:
    """Return the one command that installs all that a config uses and is not here, where it uses several."""
    missing = list(dict.fromkeys(wanted))
    if len(missing) < 2:
        return ""
    return f"all that is not installed: {catalog().command(missing)}"


def _laid_out(layers: Iterable[Layer]) -> tuple[dict[str, Any], list[str]]:
    """Lay all layers over each other; give what cannot be laid over as problems."""
    document, problems = dict[str, Any](), list[str]()
    for layer in layers:
        try:
            document = laid_over(document, layer)
        except ConfigError as error:
            problems.extend(error.problems)
    return document, problems


def _likenesses(document: dict[str, Any], registry: Registry) -> Iterator[Layer]:
    """Return what roles take over from the section `backend`, as layers below all others."""
    roles, backend = document.get("roles"), document.get("backend")
    for name, role in roles.items() if isinstance(roles, dict) else ():
        if isinstance(role, dict) and role.get("like") == "backend" and backend is not None:
            value = {"use": backend} if isinstance(backend, str) else _shareable(backend, registry)
            yield Layer("extends", f"roles.{name}.like: backend", Document(value), ("roles", name))


def _shareable(backend: Any, registry: Registry) -> Any:
    """Leave out what is of the policy alone; a section that holds something else is refused when it is structured."""
    use = backend.get("use") if isinstance(backend, dict) else None
    offer = registry.offers("backends").get(use) if isinstance(use, str) else None
    if offer is None:
        return backend
    own = {field.alias for field in fields(offer.component.config) if field.metadata.get("policy")}
    return {key: value for key, value in backend.items() if key not in own}


def _role_over(alike: Layer, document: dict[str, Any]) -> Any:
    """Return a role laid over what it takes over."""
    section, name = alike.under
    return _merged(alike.document.value, document[section][name])


def load_files_of(path: str | Path, registry: Registry) -> list[str]:
    """Load the single-file plugins that a config names, whatever else is in it; give what is wrong with them."""
    document = dict[str, Any]()
    for layer in _read_chain(Path(path), ())[0]:
        document = laid_over(document, layer)
    return list(_load_files(document.get("plugins"), registry))


def stages(layers: Iterable[Layer]) -> Iterator[tuple[Layer, dict[str, Any]]]:
    """Yield each layer with the document as it is once the layer has been laid over what came before."""
    document = dict[str, Any]()
    for layer in layers:
        document = laid_over(document, layer)
        yield layer, document


def laid_over(document: dict[str, Any], layer: Layer) -> dict[str, Any]:
    """Lay a layer over a document. Raises `ConfigError` for an override of what the document does not have."""
    value = layer.document.value
    changed = _replaced(document, layer.under, value, "") if layer.under else _merged(document, value)
    assert isinstance(changed, dict)
    return changed


def _read_chain(path: Path, children: tuple[Path, ...]) -> tuple[list[Layer], list[str]]:
    """Read a file and what it extends, the weakest first; `children` are the files that led here."""
    try:
        document = read_file(path)
    except ConfigError as error:
        if not children:
            raise
        raise ConfigError(f"extends: {error} (named in {children[-1]})") from None
    value, problems = {} if document.value is None else document.value, list(document.problems)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: wanted a mapping of sections such as `run:`, found {found_words(value)}")
    _locate_plugins(value, path)
    layer = Layer("extends" if children else "file", str(path), evolve(document, value=value))
    if "extends" not in value:
        return [layer], problems
    extends = value.pop("extends")
    if not isinstance(extends, str):
        raise ConfigError(f"extends: wanted the path of a config file, found {found_words(extends)}, in {path}")
    chain = (*children, path)
    parent = path.parent / extends
    if os.path.abspath(parent) in map(os.path.abspath, chain):
        raise ConfigError(
            f"extends: the files extend each other in a circle: {' -> '.join(map(str, (*chain, parent)))}"
        )
    base, base_problems = _read_chain(parent, chain)
    return [*base, layer], base_problems + problems


def _merged(base: Any, top: Any) -> Any:
    """Lay `top` over `base`: mappings key by key, everything else whole; another component starts afresh."""
    if isinstance(base, str) and isinstance(top, dict):
        base = {"use": base}  # `loss: clipped-pg` extended by `loss: {clip_low: 0.1}`
    if not isinstance(base, dict) or not isinstance(top, dict):
        return top
    if "use" in top and "use" in base and top["use"] != base["use"]:
        return top
    return {**base, **{key: _merged(base[key], item) if key in base else item for key, item in top.items()}}


def _read_override(override: str) -> Layer:
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"the override {override!r:.80} is not of the form key.path=value")
    value = read_text(text, f"the override {override!r:.80}")
    if value.problems:
        raise ConfigError(list(value.problems))
    return Layer("override", override, value, tuple(keys))


def _replaced(container: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """Copy `container` with the value under `keys`; `path` leads to it. Unknown keys are left to the structuring."""
    if not keys:
        return value
    key, here = keys[0], f"{path}.{path_segment(keys[0])}".removeprefix(".")
    if isinstance(container, list):
        if not key.isdecimal() or int(key[:9]) >= len(container):
            indices = f"an index from 0 to {len(container) - 1}" if container else "none, for it is empty"
            raise ConfigError(f"{here}: {path} is a list; wanted {indices}{_called(container)}, found {key!r:.60}")
        index = int(key)
        items: list[Any] = list(container)
        items[index] = _replaced(items[index], keys[1:], value, here)
        return items
    if isinstance(container, str):
        container = {"use": container}
    if container is not None and not isinstance(container, dict):
        raise ConfigError(f"{here}: {path} is {found_words(container)} and has no keys")
    if container is None and key.isdecimal():
        raise ConfigError(f"{here}: the file has no list at {path}; give it whole, {path}=[...]")
    fields: dict[str, Any] = dict(container or {})
    return {**fields, key: _replaced(fields.get(key), keys[1:], value, here)}


def _called(items: Sequence[Any]) -> str:
    """Return which items of a list have which names."""
    given = [
        item if isinstance(item, str) else item.get("name", item.get("use"))
        for item in items
        if isinstance(item, str | dict)
    ]
    named = [f"{i}: {name}" for i, name in enumerate(given) if isinstance(name, str)]
    return f" ({', '.join(named)})" if len(named) == len(items) and named else ""


def _locate_plugins(document: dict[str, Any], path: Path) -> None:
    """Make the paths under `plugins:` absolute: they are relative to the file that names them."""
    files = document.get("plugins")
    if isinstance(files, list):
        document["plugins"] = [os.path.abspath(path.parent / file) if isinstance(file, str) else file for file in files]


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # what no file system can name
        return False


def _load_files(files: object, registry: Registry) -> Iterable[str]:
    """Load single-file plugins. A config names them because it needs them, so a broken one is a problem."""
    if not isinstance(files, list):
        return
    for index, file in enumerate(files):
        if not isinstance(file, str):
            continue
        if not _is_file(file):
            yield f"plugins.{index}: there is no file {file!r}"
            continue
        registry.load_file(Path(file))
        source = str(Path(file).resolve())
        yield from (f"plugins.{index}: {broken}" for broken in registry.broken if broken.distribution == source)
