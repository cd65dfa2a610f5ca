"""Converts a document of builtins to attrs classes and back. Strict: reports all problems of the document at once."""

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, Union, cast

import attrs
from attrs import frozen
from attrs.validators import deep_iterable, deep_mapping, ge, optional

from whet.component import Component, Kind, Problem, Selection, import_path, resolve
from whet.config.document import to_line
from whet.config.messages import a_kind, choice_words, found_words, kind_word, nearest, path_segment, type_words
from whet.config.renamed import key_words, renamed_keys, value_words, with_new_names
from whet.config.values import PLAIN, fault, fault_of_choice
from whet.errors import ConfigError, PluginError

T = TypeVar("T")
_OPTIONAL: Any = type(optional(ge(0)))
_EACH: Any = type(deep_iterable(ge(0)))
_EACH_VALUE: Any = type(deep_mapping(ge(0)))
"""Validator classes of attrs. attrs does not export their names."""


class Components(Protocol):
    """The components in which selections are looked up. `whet.plugins.registry.Registry` has the installed ones."""

    def offers(self, kind: Kind) -> Mapping[str, Any]:
        """Return the offers of a kind, by name."""

    def find(self, kind: Kind, name: str) -> Any:
        """Return the offer with this name: its `component` and the `distribution` that offers it.

        Raises `PluginError` if there is none, or several have it.
        """


def structure(
    document: object, cls: type[T], components: "Components | None", also: Sequence[str] = (), *, renew: bool = False
) -> T:
    """Return a document as an attrs class. Selections are looked up in `components`.

    With `components` None, selections must be written as `unstructure(..., portable=True)` writes them. `also` are
    further known keys, for the hint "did you mean". `renew` reads old keys and values as those of today: for what whet
    wrote itself. Raises `ConfigError` with all problems, one per line: `path: what was wrong`.
    """
    structurer = _Structurer(components, renew)
    made = structurer.attrs_class(document, cls, _At(), also)
    if structurer.problems:
        raise ConfigError([str(problem) for problem in structurer.problems])
    return cast(T, made)


def unstructure(value: Any, *, portable: bool = False, path: Callable[[Any], Any] | None = None) -> Any:
    """Return attrs objects as builtins that `structure` reads again. A component becomes `use:` and its keys.

    `portable` names a component by import paths instead, so that a process without plugins can structure it. `path` is
    applied to the values of fields whose metadata have `path`.
    """

    def inside(item: Any) -> Any:
        return unstructure(item, portable=portable, path=path)

    if isinstance(value, Selection) and portable:
        component = attrs.asdict(value.component) | {"config": import_path(value.component.config)}
        config = inside(value.config)
        return {"kind": value.kind, "component": component, "config": config, "distribution": value.distribution}
    if isinstance(value, Selection):
        return {"use": value.use, **inside(value.config)}
    if attrs.has(type(value)):
        fields: dict[str, Any] = {}
        for field in attrs.fields(type(value)):
            if field.init:
                plain = inside(getattr(value, field.name))
                plain = path(plain) if path is not None and field.metadata.get("path") else plain
                fields.update(plain if field.metadata.get("inline") and not portable else {field.alias: plain})
        return fields
    if isinstance(value, Mapping):
        return {key: inside(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(map(inside, sorted(value) if isinstance(value, (set, frozenset)) else value))
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def absolute(value: Any) -> Any:
    """Return a path, or each path of a mapping, made absolute if it exists. Names on a hub stay unchanged."""
    if isinstance(value, Mapping):
        return {key: absolute(item) for key, item in value.items()}
    found = isinstance(value, str) and value != "" and Path(value).expanduser().exists()
    return str(Path(value).expanduser().absolute()) if found else value


@frozen
class _At:
    """Where a value stands: its path, and the metadata of the field that holds it."""

    path: str = ""
    metadata: Mapping[str, Any] = attrs.Factory(dict)

    def under(self, key: object) -> "_At":
        return _At(f"{self.path}.{path_segment(key)}".removeprefix("."), self.metadata)


class _Structurer:
    """Converts a document and collects its problems. What cannot be converted becomes None, and is a problem."""

    def __init__(self, components: "Components | None", renew: bool = False) -> None:
        self.components, self.renew = components, renew
        self.problems: list[Problem] = []

    def refuse(self, at: _At, message: str) -> Any:
        self.problems.append(Problem(at.path, message))

    def convert(self, value: Any, wanted: Any, at: _At) -> Any:
        if wanted in (Any, object) and (wanted := type(value)) not in (dict, list, *PLAIN):
            return value
        origin, arguments = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
        if origin in (Union, types.UnionType):
            return self._union(value, wanted, at)
        if origin in PLAIN:
            words = fault(value, origin, at.metadata)
            return self.refuse(at, words) if words else value if value is None else origin(value)
        if origin is Literal:
            words = fault_of_choice(value, arguments)
            return self.refuse(at, words) if words else value
        if wanted is Selection:
            return self._component(value, at)
        if not isinstance(origin, type):
            return self.refuse(at, f"no config can hold a value of the type {wanted!r:.80}")
        if issubclass(origin, Enum):
            words = fault_of_choice(value, [member.value for member in origin])
            return self.refuse(at, words) if words else origin(value)
        if attrs.has(origin):
            return self.attrs_class(value, wanted, at)
        if issubclass(origin, Mapping):
            return self._mapping(value, wanted, at)
        if issubclass(origin, (list, tuple, set, frozenset, Sequence)):
            return self._list(value, wanted, at)
        return self.refuse(at, f"no config can hold a value of the type {wanted!r:.80}")

    def _unfit(self, value: object, wanted: Any, at: _At) -> Any:
        return self.refuse(at, f"wanted {type_words(wanted, at.metadata.get('kind'))}, found {found_words(value)}")

    def _union(self, value: object, wanted: Any, at: _At) -> Any:
        arms = typing.get_args(wanted)
        if value is None and type(None) in arms:
            return None
        wrongs = []
        for arm in sorted(arms, key=lambda arm: arm is not type(value)):  # 3 becomes an integer, not a number
            trial = _Structurer(self.components, self.renew)
            made = trial.convert(value, arm, at)
            if not trial.problems:
                return made
            if arm is not type(None):
                wrongs.append(trial.problems)
        inside = [problems for problems in wrongs if any(problem.path != at.path for problem in problems)]
        if len(wrongs) == 1 or len(inside) == 1:
            return self.problems.extend((inside or wrongs)[0])
        return self._unfit(value, wanted, at)

    def _list(self, value: object, wanted: Any, at: _At) -> Any:
        origin, arguments = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
        if not isinstance(value, (list, tuple)):
            return self._unfit(value, wanted, at)
        items: Sequence[Any] = [arguments[0] if arguments else Any] * len(value)
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            if len(value) != len(arguments):
                return self.refuse(at, f"wanted {len(arguments)} items, found {len(value)}")
            items = arguments
        before = len(self.problems)
        made = [self.convert(one, type_, at.under(i)) for i, (one, type_) in enumerate(zip(value, items, strict=True))]
        is_list = origin not in (tuple, set, frozenset)
        return made if is_list or len(self.problems) > before else origin(made)

    def _mapping(self, value: object, wanted: Any, at: _At) -> Any:
        if not isinstance(value, Mapping):
            return self._unfit(value, wanted, at)
        key_type, item_type = typing.get_args(wanted) or (Any, Any)
        return {
            self.convert(key, key_type, _At(at.under(key).path)): self.convert(item, item_type, at.under(key))
            for key, item in value.items()
        }

    def attrs_class(self, value: Any, cls: Any, at: _At, also: Sequence[str] = ()) -> Any:
        """Return a mapping as an attrs class. `also` are keys of the class around it, for the hint "did you mean"."""
        try:
            fields = config_fields(cls)
        except PluginError as error:
            return self.refuse(at, str(error))
        inline = [key for key, field in fields.items() if self.components and field.metadata.get("inline")]
        if inline and isinstance(value, str):
            value = {"use": value}
        if not isinstance(value, Mapping):
            return self.refuse(at, f"wanted a mapping, found {found_words(value)}{_meant(value, fields)}")
        if self.renew:
            value = with_new_names(value, list(fields.values()))
        own = [key for key in fields if key not in inline]
        if inline:  # takes all keys that the class does not have
            rest = {key: item for key, item in value.items() if key not in own}
            value = {key: item for key, item in value.items() if key in own} | {inline[0]: rest}
        before, arguments = len(self.problems), dict[str, Any]()
        missing = self._refuse_unknown(value, fields, at, also)
        for key, field in fields.items():
            place = _At(at.path if key in inline else at.under(key).path, field.metadata)
            found, item = len(self.problems), value.get(key, {})
            if words := value_words(field, item):
                self.refuse(place, words)
            elif key in inline:
                arguments[key] = self._component(item, place, own)
            elif key in value or (field.metadata.get("kind") and field.metadata.get("default")):
                arguments[key] = self.convert(item, field.type, place)
            elif key in missing:
                self.refuse(place, f"missing; wanted {type_words(field.type, field.metadata.get('kind'))}")
            if len(self.problems) > found:
                arguments.pop(key, None)
        return self._make(cls, arguments, at, whole=len(self.problems) == before)

    def _refuse_unknown(
        self, value: Mapping[Any, Any], fields: "Mapping[str, attrs.Attribute[Any]]", at: _At, also: Sequence[str]
    ) -> set[str]:
        """Refuse unknown and old keys. Return the missing keys, except keys for which a refused key was written."""
        missing = {key for key, field in fields.items() if key not in value and field.default is attrs.NOTHING}
        known, renamed = [*fields, *also], renamed_keys(list(fields.values()))
        for key in value:
            if key in fields:
                continue
            if key in renamed:
                meant = renamed[key].alias
                self.refuse(at.under(key), key_words(renamed[key], value[key]))
            else:
                meant = nearest(key, known)
                self.refuse(at.under(key), f"unknown key{choice_words(key, known)}")
            missing.discard(meant or "")  # report one mistake on one line
        return missing

    def _component(self, value: Any, at: _At, reserved: Sequence[str] = ()) -> Any:
        if self.components is None:
            return self._portable(value, at)
        kind = at.metadata.get("kind")
        if kind is None:
            return self.refuse(at, "its class must declare it with whet.config.sections.selection(kind)")
        if isinstance(value, str):
            value = {"use": value}
        if not isinstance(value, Mapping):
            words = f"wanted the name of {a_kind(kind)} or `use:` and its keys, found {found_words(value)}"
            return self.refuse(at, words)
        name = value.get("use", at.metadata.get("default"))
        if name is None:
            kinds = filter(None, (kind, at.metadata.get("or_kind")))
            names = ", ".join(name for one in kinds for name in self.components.offers(one)) or "none is installed"
            return self.refuse(at, f"missing `use:`, the name of the {kind_word(kind)}; known: {names}")
        if not isinstance(name, str):
            return self.refuse(at.under("use"), f"wanted text, found {found_words(name)}")
        other, plain = at.metadata.get("or_kind"), name.rpartition("/")[2]  # of DISTRIBUTION/NAME
        if other and plain not in self.components.offers(kind) and plain in self.components.offers(other):
            kind = other
        try:
            offer = self.components.find(kind, name)
            taken = [key for key in config_fields(offer.component.config) if key in reserved]
        except PluginError as error:
            return self.refuse(at.under("use") if "use" in value else at, str(error))
        if taken:
            words = f"{name!r} of {offer.distribution} has its own key {taken[0]!r}, which every {kind_word(kind)} has"
            return self.refuse(at, f"{words} already; its author must rename it")
        rest = {key: item for key, item in value.items() if key != "use"}
        config = self.attrs_class(rest, offer.component.config, at, reserved)
        return Selection(kind, offer.component, config, offer.distribution, name)

    def _portable(self, value: Any, at: _At) -> Selection:
        component = Component(**value["component"] | {"config": resolve(value["component"]["config"])})
        config = self.attrs_class(value["config"], component.config, at)
        return Selection(value["kind"], component, config, value["distribution"])

    def _make(self, cls: Any, arguments: Mapping[str, Any], at: _At, *, whole: bool) -> Any:
        """Construct the class. Refuse with every validator that objects rather than the first."""
        before, words = len(self.problems), ""
        try:
            if whole:
                return cls(**arguments)
        except Exception as error:  # of a plugin's own converter or validator
            words = _one_line(error)
        with suppress(Exception):
            with attrs.validators.disabled():
                made = cls(**arguments)
            for field in attrs.fields(cls):
                if field.validator is not None and field.alias in arguments:
                    self._ask(field.validator, made, field, getattr(made, field.name), at.under(field.alias))
        if words and len(self.problems) == before:
            self.refuse(at, words)
        return None

    def _ask(self, validator: Any, made: Any, field: "attrs.Attribute[Any]", value: Any, at: _At) -> None:
        """Call a validator. If it checks items, refuse each item that it objects to."""
        items = _items_of(validator, value)
        for key, item, inner in items or ():
            self._ask(inner, made, field, item, at.under(key))
        if items is None:
            try:
                validator(made, field, value)
            except Exception as error:
                self.refuse(at, _one_line(error).removeprefix(f"{field.name!r} "))


def _meant(value: object, fields: "Mapping[str, attrs.Attribute[Any]]") -> str:
    """Return a hint: how to switch a section off, if the value looks meant so, or that a text is meant as its path."""
    off = {key: field.metadata["off"] for key, field in fields.items() if "off" in field.metadata}
    if off and (value in (False, None, 0) or str(value).lower() in ("off", "no", "none", "false")):
        return f"; to switch it off: {to_line(off)}"
    return f"; write {to_line({'path': value})}" if isinstance(value, str) and "path" in fields else ""


def config_fields(cls: Any) -> "dict[str, attrs.Attribute[Any]]":
    """Return the fields that a config can set, by key, with resolved types. Raises `PluginError` where one has none."""
    try:
        attrs.resolve_types(cls)
    except Exception as error:  # any type: annotations are a plugin's code
        raise PluginError(f"the types of {cls.__module__}.{cls.__qualname__} cannot be resolved: {error}") from error
    return {field.alias: field for field in attrs.fields(cls) if field.init}


def _one_line(error: Exception) -> str:
    """Return the message of an error on one line. Validators of attrs have further arguments, which are left out."""
    words = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    kind = "" if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: "
    return kind + " ".join(words.split()) if words else type(error).__name__


def _items_of(validator: Any, value: Any) -> list[tuple[object, Any, Any]] | None:
    """Return key, item and validator of each item that a validator checks. None: it checks the value itself."""
    if isinstance(validator, _OPTIONAL):
        return None if value is None else _items_of(validator.validator, value)
    if isinstance(validator, _EACH) and isinstance(value, Sequence):
        return [(index, item, validator.member_validator) for index, item in enumerate(value)]
    if isinstance(validator, _EACH_VALUE) and isinstance(value, Mapping) and validator.key_validator is None:
        return [(key, item, validator.value_validator) for key, item in value.items()]
    return None
