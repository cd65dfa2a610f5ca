"""The layers that a config is put together from, and the file and line of each of its keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from attrs import fields, frozen

from whet.config.document import Document, read_text
from whet.config.messages import found_words, path_segment
from whet.config.sections import Config
from whet.errors import ConfigError

KeyPath = tuple[str, ...]
_MISSING = object()


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
class Origin:
    """One place that says what a key's value is."""

    kind: Literal["default", "extends", "file", "override"]
    value: Any
    """The value there."""
    name: str = ""
    """The path of the file, or the override as it was written."""
    line: int | None = None
    """The line in the file."""

    def __str__(self) -> str:
        if self.kind == "override":
            return f"the override {self.name!r:.80}"
        return f"{self.name}:{self.line}" if self.line else self.name or "default"


def stages(layers: Iterable[Layer]) -> Iterator[tuple[Layer, dict[str, Any]]]:
    """Yield each layer with the document as it is once the layer has been laid over what came before."""
    document = dict[str, Any]()
    for layer in layers:
        document = laid_over(document, layer)
        yield layer, document


def laid_over(document: dict[str, Any], layer: Layer) -> dict[str, Any]:
    """Return a document with a layer over it. Raises `ConfigError` for an override of an item that does not exist."""
    value = layer.document.value
    changed = _replaced(document, layer.under, value, "") if layer.under else merged(document, value)
    assert isinstance(changed, dict)
    return changed


def merged(base: Any, top: Any) -> Any:
    """Return `base` with `top` over it: mappings key by key, all else whole. Another component replaces all keys."""
    base = in_full(base)  # `loss: NAME` extended by `loss: {KEY: VALUE}`
    if not isinstance(base, dict) or not isinstance(top, dict):
        return top
    if "use" in top and "use" in base and top["use"] != base["use"]:
        return top
    return {**base, **{key: merged(base[key], item) if key in base else item for key, item in top.items()}}


def in_full(value: Any) -> Any:
    """Return a value with the short form of `use:` written out."""
    return {"use": value} if isinstance(value, str) else value


def read_override(override: str) -> Layer:
    """Return `key.path=value` as a layer. Raises `ConfigError` where it has another form or the value is no YAML."""
    if not isinstance(override, str):
        raise ConfigError(f"an override is a text key.path=value, found {found_words(override)}; unpack a list by *")
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"the override {override!r:.80} is not of the form key.path=value")
    value = read_text(text, f"the override {override!r:.80}")
    if value.problems:
        raise ConfigError(list(value.problems))
    return Layer("override", override, value, tuple(keys))


def _replaced(container: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """Return a copy of `container`, which stands at `path`, with the value under `keys`. New keys are checked later."""
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
    container = in_full(container)
    if container is not None and not isinstance(container, dict):
        raise ConfigError(f"{here}: {path} is {found_words(container)} and has no keys")
    if container is None and key.isdecimal():
        words = f"give it whole, {path}=[...], or {path}={{{key}: ...}} if it is a mapping"
        raise ConfigError(f"{here}: the file has no list at {path}; {words}")
    fields: dict[str, Any] = dict(container or {})
    return {**fields, key: _replaced(fields.get(key), keys[1:], value, here)}


def _called(items: Sequence[Any]) -> str:
    """Return which items of a list have which names."""
    given = [item.get("name", item.get("use")) for item in map(in_full, items) if isinstance(item, dict)]
    named = [f"{i}: {name}" for i, name in enumerate(given) if isinstance(name, str)]
    return f" ({', '.join(named)})" if len(named) == len(items) and named else ""


def origins_of(path: KeyPath, history: Sequence[tuple[Layer, dict[str, Any]]]) -> list[Origin]:
    """Return the layers that set a path, the weakest first. A layer whose component was replaced is left out."""
    found: list[Origin] = []
    for layer, document in history:
        if _at(document, path) is _MISSING:
            found.clear()
            continue
        if (value := _given(layer, path)) is not _MISSING:
            line = None if layer.kind == "override" else layer.document.line(path)
            found.append(Origin(layer.kind, value, layer.name, line))
    return found


def _given(layer: Layer, path: KeyPath) -> Any:
    """Return the value that a layer itself has at a path."""
    shared = min(len(layer.under), len(path))
    if layer.under[:shared] != path[:shared] or len(path) < len(layer.under):
        return _MISSING
    return _at(layer.document.value, path[len(layer.under) :])


def _at(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = in_full(value)
        if isinstance(value, Mapping):
            value = next((item for name, item in value.items() if str(name) == key), _MISSING)
        elif isinstance(value, list) and key.isdecimal() and int(key[:9]) < len(value):
            value = value[int(key)]
        else:
            return _MISSING
    return value


@contextmanager
def placing(layers: Iterable[Layer], before: Sequence[str] = ()) -> Iterator[None]:
    """Name the place of each problem of a `ConfigError`: `it.yaml:12: run.steps: ...`. `before` are put before it."""
    try:
        yield
    except ConfigError as error:
        history = list(stages(layers))
        raise ConfigError([*before, *(_placed(one, history) for one in error.problems)], error.remedy) from error


def placed(problems: Iterable[str], layers: Iterable[Layer]) -> tuple[str, ...]:
    """Return problems with the place of each whose key the layers set: `it.yaml:12: cluster.gpus: ...`."""
    history = list(stages(layers))

    def is_set(path: str) -> bool:
        return ".".join(map(path_segment, _keys(path, history[-1][1]))) == path

    return tuple(_placed(one, history) if is_set(one.partition(": ")[0]) else one for one in problems)


def _placed(problem: str, history: Sequence[tuple[Layer, dict[str, Any]]]) -> str:
    """Return a problem with the file and line of its key, or else of the deepest part of its path that exists."""
    path = problem.partition(": ")[0]
    keys = _keys(path, history[-1][1])
    for length in range(len(keys), 0, -1):
        found = origins_of(keys[:length], history)
        if not found or found[-1].kind == "override":  # without an origin: an override of a key below made it
            return f"command line: {problem}"
        if found[-1].line:
            return f"{found[-1]}: {problem}"
    is_key = path.partition(".")[0] in {field.alias for field in fields(Config)}
    file = next(layer.name for layer, _ in reversed(history) if layer.kind == "file")
    return f"{file}: {problem}" if is_key else problem


def _keys(path: str, value: Any) -> KeyPath:
    """Return the keys of a problem's path, as far as they exist in the document."""
    value = in_full(value)
    items = list(enumerate(value)) if isinstance(value, list) else list(getattr(value, "items", dict)())
    for key, item in items:
        name = path_segment(key)
        if path == name or path.startswith(f"{name}."):
            return (str(key), *_keys(path[len(name) + 1 :], item))
    return ()
