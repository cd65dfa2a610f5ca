"""Explains config classes. The string under a field is its documentation, which `whet schema` and the docs print."""

import ast
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Union

import attrs
from attrs import frozen
from attrs.validators import and_, deep_iterable, deep_mapping, ge, in_, matches_re, max_len, min_len, optional

from whet.component import Kind, Selection
from whet.config.document import to_line
from whet.config.messages import type_words, value_words
from whet.config.sections import Config
from whet.config.structure import config_fields, unstructure

REQUIRED = "required"


@frozen
class FieldDoc:
    """One key of a section or of a component."""

    name: str
    """Dotted path from the described class."""
    type: str
    """The type as text, e.g. `a list of text`."""
    default: str
    """The default as YAML. `required`: there is none. Empty: the keys below have defaults of their own."""
    doc: str
    """The string under the field, on one line."""
    kind: Kind | None = None
    """The kind of component that the field holds."""
    allowed: str = ""
    """The bounds that its validators require beyond the type, e.g. `at least 1`."""


def describe(cls: type) -> list[FieldDoc]:
    """Return the documentation of every key of an attrs class, depth first. Keys of nested classes have dotted
    names.
    """
    return [_field_doc(*found) for found in walk(cls)]


def sections() -> dict[str, type]:
    """Return the attrs class of every section of a config file, by its dotted path."""
    found: dict[str, type] = {}
    for prefix, _, field in walk(Config):
        if (inner := _inner(field.type)) is not None and "kind" not in field.metadata:
            found.setdefault(f"{prefix}{field.alias}".replace(".NAME.", ".").replace(".N.", "."), inner[0])
    return found


def selections() -> dict[str, Kind]:
    """Return the sections of a config file that hold components, with their kinds."""
    return {field.name: field.metadata["kind"] for field in attrs.fields(Config) if "kind" in field.metadata}


def summary(cls: type) -> str:
    """Return the first paragraph of a class's docstring on one line."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the strings under the fields of a class and its parents, on one line each."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        docs.update(_own_docs(owner))
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):  # a class without a source file, as in an interactive session
        return {}
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, beneath in zip(body.body, body.body[1:], strict=False):
        match statement, beneath:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def walk(cls: type, prefix: str = "") -> "Iterator[tuple[str, type, attrs.Attribute[Any]]]":
    """Yield every key of an attrs class, depth first: the path to its class, the class and the field."""
    for field in config_fields(cls).values():
        yield prefix, cls, field
        if "kind" not in field.metadata and (inner := _inner(field.type)) is not None:
            yield from walk(inner[0], f"{prefix}{field.alias}{inner[1]}.")


def _field_doc(prefix: str, cls: type, field: "attrs.Attribute[Any]") -> FieldDoc:
    inner = _inner(field.type)
    nested = inner is not None and inner[1] == "" and field.default is not None
    return FieldDoc(
        f"{prefix}{'use' if field.metadata.get('inline') else field.alias}",
        type_words(field.type, field.metadata.get("kind")),
        "" if nested and field.default is not attrs.NOTHING else _default(field),
        field_docs(cls).get(field.name, ""),
        field.metadata.get("kind"),
        allowed(field.validator),
    )


def allowed(validator: Any) -> str:
    """Return what a validator of attrs requires, e.g. `at least 1, at most 8`. Empty for other functions."""
    words = _ALLOWED.get(type(validator))
    return words(validator) if words else ""


def _bound(validator: Any) -> str:
    compared = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}[validator.compare_op]
    return "finite" if validator.bound == math.inf else f"{compared} {value_words(validator.bound)}"


def _all(validators: Iterable[Any]) -> str:
    return ", ".join(filter(None, map(allowed, validators)))


_ALLOWED: dict[type, Callable[[Any], str]] = {  # attrs does not export the classes of its validators
    list: _all,
    tuple: _all,
    type(and_()): lambda all_of: _all(all_of._validators),
    type(ge(0)): _bound,
    type(min_len(0)): lambda least: "not empty" if least.min_length == 1 else f"at least {least.min_length} long",
    type(max_len(0)): lambda most: f"at most {most.max_length} long",
    type(in_([])): lambda one: f"one of {', '.join(map(value_words, one.options))}",
    type(matches_re("")): lambda matching: f"matching {matching.pattern.pattern!r}",
    type(deep_iterable(ge(0))): lambda items: f"each item {allowed(items.member_validator)}",
    type(deep_mapping(value_validator=ge(0))): lambda values: f"each value {allowed(values.value_validator)}",
    type(optional(ge(0))): lambda inner: f"{allowed(inner.validator)}, or null",
}


def _default(field: "attrs.Attribute[Any]") -> str:
    if field.metadata.get("default") is not None:
        return str(field.metadata["default"])
    if field.default is attrs.NOTHING:
        return REQUIRED
    factory = isinstance(field.default, attrs.Factory)  # type: ignore[arg-type]
    if factory and field.default.takes_self:  # type: ignore[union-attr]
        return "computed"
    value = unstructure(field.default.factory() if factory else field.default)  # type: ignore[union-attr]
    return to_line(value)


def _inner(wanted: Any) -> tuple[type, str] | None:
    """Return the attrs class inside a type, and the path to its keys: `.N` for a list, `.NAME` for a mapping."""
    if isinstance(wanted, type) and attrs.has(wanted) and wanted is not Selection:
        return wanted, ""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (Union, types.UnionType):
        found = [inner for inner in map(_inner, arguments) if inner is not None]
        return found[0] if found else None
    if not arguments or (inner := _inner(arguments[-1] if origin is dict else arguments[0])) is None:
        return None
    return inner[0], f"{'.NAME' if origin is dict else '.N'}{inner[1]}"
