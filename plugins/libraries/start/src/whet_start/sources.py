"""Describes every value of a loaded config: where it comes from, what it means, and what it may be."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from whet.component import Selection
from whet.config.messages import a_kind, choice_words, nearest
from whet.config.structure import unstructure
from whet.errors import ConfigError
from whet.plan.layers import KeyPath, Layer, Origin, origins_of, stages
from whet.plan.load import Loaded
from whet_start.explain import REQUIRED, describe


@frozen
class Setting:
    """A key of the effective config."""

    key: str
    """Dotted path."""
    value: Any
    """The value as builtins."""
    type: str
    """The type in words."""
    allowed: str
    """The bounds of its validators beyond the type."""
    doc: str
    owner: str
    """The owner of the key: a section, or a component with its distribution."""
    origins: tuple[Origin, ...]
    """The places that set the key: the one in force, then those that it replaced."""

    @property
    def origin(self) -> Origin:
        """Return the place in force."""
        return self.origins[0]


def settings(loaded: Loaded) -> list[Setting]:
    """Return every key of the effective config, in the order of the config classes."""
    history = list(stages(loaded.layers))
    return [_setting(leaf, history) for leaf in _leaves(loaded.config, (), "a section of every config")]


def explain(loaded: Loaded, key: str) -> list[Setting]:
    """Return the key, or all keys below it. Raises `ConfigError` with the nearest key where there is none.

    An item of a list is named by its position or by its name: `environments.0.use`, `environments.NAME.use`.
    """
    found = settings(loaded)
    key = _numbered(key, {setting.key: setting.value for setting in found})
    if chosen := [setting for setting in found if setting.key == key or setting.key.startswith(f"{key}.")]:
        return chosen
    for setting in found:
        if key.startswith(f"{setting.key}."):
            words = "null" if setting.value is None else "empty" if setting.value in ([], {}) else "a plain value"
            section = key.partition(".")[0]
            raise ConfigError(
                f"there is no key {key!r}: {setting.key} is {words} in this config; "
                f"`whet schema {section}` says what it can hold"
            )
    raise ConfigError(f"there is no key {key!r}{_meant(key, [setting.key for setting in found])}")


def _numbered(key: str, values: Mapping[str, Any]) -> str:
    """Put the position of an item of a list in the place of its name, or of its `use:` where one item alone has it."""
    here: list[str] = []
    for part in key.split("."):
        before = ".".join(here)
        named = _items_called(part, before, values)
        here.append(named[0] if len(named) == 1 and f"{before}.{part}" not in values else part)
    return ".".join(here)


def _items_called(name: str, path: str, values: Mapping[str, Any]) -> list[str]:
    """Return the positions in the list at a path of the items that are called so."""
    positions = dict.fromkeys(key.removeprefix(f"{path}.").partition(".")[0] for key in values if key.startswith(path))
    numbers = [position for position in positions if position.isdecimal()]
    for word in ("name", "use"):
        if called := [number for number in numbers if values.get(f"{path}.{number}.{word}") == name]:
            return called
    return []


def _meant(key: str, known: Sequence[str]) -> str:
    """Return which keys were probably meant: those that end alike, or else the nearest, or else its neighbours."""
    last = key.rpartition(".")[2]
    if alike := [name for name in known if name.rpartition(".")[2] == last]:
        alike.sort(key=lambda name: -difflib.SequenceMatcher(None, key, name).ratio())
        return f" (did you mean {' or '.join(map(repr, alike[:2]))}?)"
    if nearest(key, known):
        return choice_words(key, known)
    ends = {name.rpartition(".")[2]: name for name in reversed(known)}
    if (close := nearest(last, ends)) is not None:
        return f" (did you mean {ends[close]!r}?)"
    return f"; known: {', '.join(dict.fromkeys(name.partition('.')[0] for name in known))}"


@frozen
class _Leaf:
    path: KeyPath
    value: Any
    cls: type
    field: "attrs.Attribute[Any]"
    owner: str


def _leaves(instance: Any, path: KeyPath, owner: str) -> Iterator[_Leaf]:
    """Walk the values that hold no further keys."""
    for field in attrs.fields(type(instance)):
        if field.init:
            below = path if field.metadata.get("inline") else (*path, field.alias or field.name)
            whose = f"the section `{below[0]}`" if len(below) == 1 else owner
            yield from _values(getattr(instance, field.name), below, _Leaf(below, None, type(instance), field, whose))


def _values(value: Any, path: KeyPath, holder: _Leaf) -> Iterator[_Leaf]:
    if isinstance(value, Selection):
        yield attrs.evolve(holder, path=(*path, "use"), value=value.use)
        yield from _leaves(value.config, path, f"`{value.name}` of {value.distribution}")
    elif attrs.has(type(value)):
        yield from _leaves(value, path, holder.owner)
    elif items := _items(value):
        for key, item in items:
            yield from _values(item, (*path, key), holder)
    else:
        yield attrs.evolve(holder, path=path, value=unstructure(value))


def _items(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a list or mapping that have keys of their own; none of plain ones."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    nested = any(isinstance(item, Selection) or attrs.has(type(item)) for _, item in pairs)
    return [(str(key), item) for key, item in pairs] if nested else []


def _setting(leaf: _Leaf, history: Sequence[tuple[Layer, dict[str, Any]]]) -> Setting:
    key = "use" if leaf.field.metadata.get("inline") else leaf.field.alias
    doc = next(doc for doc in describe(leaf.cls) if doc.name == key)
    if doc.kind and doc.type.startswith("a list of ") and leaf.path[-1] == "use":  # one of its items
        doc = attrs.evolve(doc, type=a_kind(doc.kind), default=REQUIRED)
    origins = list(origins_of(leaf.path, history))[::-1]
    if doc.default != REQUIRED:
        origins.append(Origin("default", doc.default))
    return Setting(".".join(leaf.path), leaf.value, doc.type, doc.allowed, doc.doc, leaf.owner, tuple(origins))
