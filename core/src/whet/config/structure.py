"""Converts a document of builtins to attrs classes and back. Strict: all problems of the document are reported
at once.
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import attrs
import cattrs
from attrs import frozen

from whet.component import Component, Kind, Problem, Selection, import_path, resolve
from whet.config.bounds import items_of
from whet.config.document import to_line
from whet.config.messages import a_kind, choice_words, found_words, kind_word, nearest, path_segment, type_words
from whet.config.renamed import key_words, renamed_keys, value_words
from whet.config.values import (
    PLAIN,
    StructureError,
    enum_member,
    impossible,
    is_list,
    is_literal,
    is_mapping,
    is_union,
    literal,
    one_line,
    refused,
    unusable_paths,
)  # fmt: skip
from whet.errors import ConfigError, PluginError

T = TypeVar("T")


class Offered(Protocol):
    """A component that a plugin offers."""

    @property
    def component(self) -> Component:
        """Return the component."""
        ...

    @property
    def distribution(self) -> str:
        """Return the distribution that offers the component, as text."""
        ...


class Components(Protocol):
    """The components in which selections are looked up. `whet.plugins.registry.Registry` has the installed ones."""

    def offers(self, kind: Kind) -> Mapping[str, Any]:
        """Return the offers of a kind, by name."""
        ...

    def find(self, kind: Kind, name: str) -> Offered:
        """Return the component with this name. Raises `PluginError` if there is none, or several have it."""
        ...


def structure(document: object, cls: type[T], components: "Components | None", also: Sequence[str] = ()) -> T:
    """Return a document as an attrs class. Selections are looked up in `components`.

    With `components` None, selections must be written as `unstructure(..., portable=True)` writes them. `also` are
    further known keys, for the hint "did you mean". Raises `ConfigError` with all problems, one per line:
    `path: what was wrong`.
    """
    problems = list[Problem]()
    made: Any = None
    with _under(None, problems):
        made = _Structurer(components).attrs_class(document, cls, also)
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    return cast(T, made)


def unstructure(value: Any, *, portable: bool = False, path: Callable[[Any], Any] | None = None) -> Any:
    """Return attrs objects as builtins that `structure` reads again. A component becomes `use:` and its keys.

    `portable` names a component by import paths instead, so that a process without plugins can structure it. `path` is
    applied to the values of fields whose metadata have `path`.
    """

    def inside(item: Any) -> Any:
        return unstructure(item, portable=portable, path=path)

    if isinstance(value, Selection):
        return _portable(value) if portable else {"use": value.name, **inside(value.config)}
    if attrs.has(type(value)):
        return _unstructure_fields(value, portable, path)
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


def _unstructure_fields(value: Any, portable: bool, path: Callable[[Any], Any] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for field in attrs.fields(type(value)):
        if field.init:
            plain = unstructure(getattr(value, field.name), portable=portable, path=path)
            if path is not None and field.metadata.get("path"):
                plain = path(plain)
            fields.update(plain if _is_inline(field) and not portable else {_key(field): plain})
    return fields


def _portable(selection: Selection) -> dict[str, Any]:
    return {
        "kind": selection.kind,
        "component": attrs.asdict(selection.component) | {"config": import_path(selection.component.config)},
        "config": unstructure(selection.config, portable=True),
        "distribution": selection.distribution,
    }


@frozen
class _Use:
    """The component kind of a field, and its default component."""

    kind: Kind
    default: str | None


class _Structurer:
    def __init__(self, components: "Components | None") -> None:
        self.components = components
        self.converter = cattrs.Converter(detailed_validation=False)
        register = self.converter.register_structure_hook_factory
        for plain, hook in PLAIN.items():
            self.converter.register_structure_hook(plain, hook)
        self.converter.register_structure_hook_func(lambda wanted: wanted is object, lambda value, _: value)
        register(lambda wanted: isinstance(wanted, type) and issubclass(wanted, Enum), lambda wanted: enum_member)
        register(is_literal, lambda wanted: literal)
        register(is_union, lambda wanted: self._union)
        register(is_list, lambda wanted: self._list)
        register(is_mapping, lambda wanted: self._mapping)
        register(attrs.has, lambda wanted: self.attrs_class)
        register(lambda wanted: wanted is Selection, lambda wanted: self._from_portable)

    def structure(self, value: object, wanted: Any) -> Any:
        return self.converter.structure(value, wanted)

    def _union(self, value: object, wanted: Any) -> Any:
        arms = typing.get_args(wanted)
        if value is None and type(None) in arms:
            return None
        arms = tuple(arm for arm in arms if arm is not type(None))
        wrongs = []
        for arm in sorted(arms, key=lambda arm: arm is not type(value)):  # 3 becomes an integer, not a number
            try:
                return self.structure(value, arm)
            except StructureError as wrong:
                wrongs.append(wrong)
        inside = [wrong for wrong in wrongs if any(problem.path for problem in wrong.problems)]
        if len(wrongs) == 1 or len(inside) == 1:
            raise (inside or wrongs)[0]
        raise refused(f"wanted {type_words(wanted)}, found {found_words(value)}")

    def _list(self, value: object, wanted: Any) -> Any:
        origin, arguments = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
        if not isinstance(value, (list, tuple)):
            raise refused(f"wanted {type_words(wanted)}, found {found_words(value)}")
        items: Sequence[Any] = [arguments[0] if arguments else Any] * len(value)
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            if len(value) != len(arguments):
                raise refused(f"wanted {len(arguments)} items, found {len(value)}")
            items = arguments
        made, problems = [], list[Problem]()
        for index, (item, type_) in enumerate(zip(value, items, strict=True)):
            with _under(index, problems):
                made.append(self.structure(item, type_))
        _raise(problems)
        return origin(made) if origin in (tuple, set, frozenset) else made

    def _mapping(self, value: object, wanted: Any) -> Any:
        if not isinstance(value, Mapping):
            raise refused(f"wanted {type_words(wanted)}, found {found_words(value)}")
        key_type, item_type = typing.get_args(wanted) or (Any, Any)
        made, problems = {}, list[Problem]()
        for key, item in value.items():
            with _under(key, problems):
                made[self.structure(key, key_type)] = self.structure(item, item_type)
        _raise(problems)
        return made

    def attrs_class(self, value: object, cls: Any, also: Sequence[str] = ()) -> Any:
        """Return a mapping as an attrs class. `also` are keys of the class around it, for the hint "did you mean"."""
        fields = _fields(cls)
        inline = next((field for field in fields if _is_inline(field)), None) if self.components else None
        if inline is not None and isinstance(value, str):
            value = {"use": value}
        if not isinstance(value, Mapping):
            raise refused(f"wanted a mapping, found {found_words(value)}{_off_words(value, fields)}")
        if inline is not None:
            own = [_key(field) for field in fields if field is not inline]
            rest = {key: item for key, item in value.items() if key not in own}
            value = {key: item for key, item in value.items() if key in own} | {_key(inline): rest}
        problems, arguments = list[Problem](), dict[str, Any]()
        known, before = [_key(field) for field in fields], renamed_keys(fields)
        missing = [_key(f) for f in fields if _key(f) not in value and f.default is attrs.NOTHING and not _default(f)]
        for key in value:
            if key in before and key not in known:
                missing = [name for name in missing if name != _key(before[key])]
                problems.append(Problem(path_segment(key), key_words(before[key], value[key])))
            elif key not in known:
                meant = nearest(key, [*known, *also])
                missing = [name for name in missing if name != meant]  # report one mistake on one line
                problems.append(Problem(path_segment(key), f"unknown key{choice_words(key, [*known, *also])}"))
        for field in fields:
            if _key(field) in value or _default(field):
                with _under(None if field is inline else _key(field), problems):
                    arguments[_key(field)] = self._field(value.get(_key(field), _ABSENT), field, known)
            elif _key(field) in missing:
                problems.append(Problem(_key(field), f"missing; wanted {type_words(field.type)}"))
        if problems:
            raise StructureError(*problems, *_objections(cls, arguments))
        return _make(cls, arguments)

    def _field(self, value: object, field: "attrs.Attribute[Any]", known: Sequence[str]) -> Any:
        kind = field.metadata.get("kind")
        if words := value_words(field, value):
            raise refused(words)
        if kind is None or self.components is None:
            made = self.structure(value, field.type)
            _raise(list(impossible(made, infinite=bool(field.metadata.get("infinite")))))
            if any(field.metadata.get(word) for word in ("path", "names_path", "writes")):
                _raise(list(unusable_paths(made)))
            return made
        reserved = [name for name in known if name != _key(field)] if _is_inline(field) else []
        return self._selected(value, field.type, _Use(kind, _default(field)), reserved)

    def _selected(self, value: object, wanted: Any, use: _Use, reserved: Sequence[str] = ()) -> Any:
        """Return the value of a field of components: one component, None, or a list or mapping of components."""
        arguments = typing.get_args(wanted)
        if wanted is Selection or value is _ABSENT:
            return self._component({} if value is _ABSENT else value, use, reserved)
        if is_union(wanted):
            arms = [arm for arm in arguments if arm is not type(None)]
            return None if value is None and len(arms) < len(arguments) else self._selected(value, arms[0], use)
        problems = list[Problem]()
        if is_list(wanted):
            if not isinstance(value, (list, tuple)):
                raise refused(f"wanted a list of {kind_word(use.kind)}s, found {found_words(value)}")
            made = []
            for index, item in enumerate(value):
                with _under(index, problems):
                    made.append(self._selected(item, arguments[0], use))
            _raise(problems)
            return tuple(made) if typing.get_origin(wanted) is tuple else made
        if not isinstance(value, Mapping):
            raise refused(f"wanted a mapping of names to {kind_word(use.kind)}s, found {found_words(value)}")
        named = {}
        for key, item in value.items():
            with _under(key, problems):
                named[self.structure(key, str)] = self._selected(item, arguments[-1], use)
        _raise(problems)
        return named

    def _component(self, value: object, use: _Use, reserved: Sequence[str]) -> Selection:
        assert self.components is not None
        if isinstance(value, str):
            value = {"use": value}
        if not isinstance(value, Mapping):
            raise refused(f"wanted the name of {a_kind(use.kind)} or `use:` and its keys, found {found_words(value)}")
        name = value.get("use", use.default)
        if name is None:
            names = ", ".join(self.components.offers(use.kind)) or "none is installed"
            raise refused(f"missing `use:`, the name of the {kind_word(use.kind)}; known: {names}")
        if not isinstance(name, str):
            raise StructureError(Problem("use", f"wanted text, found {found_words(name)}"))
        try:
            offer = self.components.find(use.kind, name)
            taken = [_key(field) for field in _fields(offer.component.config) if _key(field) in reserved]
        except PluginError as error:
            raise StructureError(Problem("use" if "use" in value else "", str(error))) from None
        if taken:
            raise refused(f"{name!r} of {offer.distribution} has its own key {taken[0]!r}, which every"
                         f" {kind_word(use.kind)} has already; its author must rename it")  # fmt: skip
        rest = {key: item for key, item in value.items() if key != "use"}
        config = self.attrs_class(rest, offer.component.config, reserved)
        return Selection(use.kind, offer.component, config, offer.distribution)

    def _from_portable(self, value: Any, _: Any) -> Selection:
        if self.components is not None:
            raise refused("its class must declare it with whet.config.sections.selection(kind)")
        component = Component(**value["component"] | {"config": resolve(value["component"]["config"])})
        config = self.structure(value["config"], component.config)
        return Selection(value["kind"], component, config, value["distribution"])


_ABSENT = object()


def _key(field: "attrs.Attribute[Any]") -> str:
    return field.alias or field.name


def _is_inline(field: "attrs.Attribute[Any]") -> bool:
    return bool(field.metadata.get("inline"))


def _default(field: "attrs.Attribute[Any]") -> str | None:
    """Return the component that is used where the key is left out."""
    name: str | None = field.metadata.get("default") if "kind" in field.metadata else None
    return name


def _off_words(value: object, fields: "Sequence[attrs.Attribute[Any]]") -> str:
    """Return a hint how to switch a section off, if the value looks meant so and the section can be switched off."""
    off = {_key(field): field.metadata["off"] for field in fields if "off" in field.metadata}
    meant = value in (False, None, 0) or str(value).lower() in ("off", "no", "none", "false")
    return f"; to switch it off: {to_line(off)}" if meant and off else ""


def _fields(cls: Any) -> "list[attrs.Attribute[Any]]":
    """Return the fields that a config can set, with their types resolved."""
    try:
        attrs.resolve_types(cls)
    except Exception as error:  # any type: annotations are a plugin's code
        raise PluginError(f"the types of {cls.__module__}.{cls.__qualname__} cannot be resolved: {error}") from error
    return [field for field in attrs.fields(cls) if field.init]


@contextmanager
def _under(key: object, problems: list[Problem]) -> Iterator[None]:
    """Collect the problems raised in the body, with paths under a key. None: inline, without a key of its own."""
    segment = "" if key is None else path_segment(key)
    try:
        yield
    except StructureError as wrong:
        problems.extend(
            Problem(".".join(filter(None, (segment, problem.path))), problem.message) for problem in wrong.problems
        )
    except PluginError as error:
        problems.append(Problem(segment, str(error)))
    except cattrs.StructureHandlerNotFoundError as error:
        problems.append(Problem(segment, f"no config can hold a value of the type {error.type_!r:.80}"))
    except (ValueError, TypeError) as error:  # from cattrs' hooks for further types, such as dates
        problems.append(Problem(segment, one_line(error)))


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise StructureError(*problems)


def _make(cls: Any, arguments: Mapping[str, Any]) -> Any:
    """Construct the class. Report every validator that objects rather than the first."""
    try:
        return cls(**arguments)
    except (ValueError, TypeError) as error:
        objections = _objections(cls, arguments) or [Problem("", one_line(error))]
        raise StructureError(*objections) from error


def _objections(cls: Any, arguments: Mapping[str, Any]) -> list[Problem]:
    """Return the objections of the validators of all given keys."""
    try:
        with attrs.validators.disabled():
            made = cls(**arguments)
    except (ValueError, TypeError):
        return []
    problems = list[Problem]()
    for field in attrs.fields(cls):
        if field.validator is not None and _key(field) in arguments:
            with _under(_key(field), problems):
                _ask(field.validator, made, field, getattr(made, field.name))
    return problems


def _ask(validator: Any, made: Any, field: "attrs.Attribute[Any]", value: Any) -> None:
    """Call a validator. If it checks items, report each item that it refuses."""
    found = items_of(validator, value)
    if found is None:
        try:
            validator(made, field, value)
        except (ValueError, TypeError) as error:
            raise refused(one_line(error).removeprefix(f"{field.name!r} ")) from error
        return
    problems = list[Problem]()
    for key, item, inner in found:
        with _under(key, problems):
            _ask(inner, made, field, item)
    _raise(problems)
