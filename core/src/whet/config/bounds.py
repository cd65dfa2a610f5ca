"""Bounds of the numbers in a config. Every number of core and of the plugins has a lower and an upper bound.

A bound is a validator of attrs on the field, so that `whet schema` and the reference pages show it. The upper bounds
are far above what anybody trains with. They refuse a number that was mistyped, or that no clock, array or optimizer can
take. nan and infinity are refused when the config is structured. A field whose metadata has `infinite: True` takes an
infinity where its validator has no bound: `inf` without an upper one, `-inf` without a lower one.
"""

import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

import attrs
from attrs.validators import and_, deep_iterable, deep_mapping, ge, gt, le, lt, optional

STEPS = 1_000_000_000
"""Steps of a run, and steps between two events."""
TOKENS = 100_000_000
"""Tokens of a sequence, of a completion or of a micro-batch."""
RECORDS = 1_000_000_000
"""Records of a file and tasks of an environment."""
BATCH = 10_000_000
"""Prompts, records, groups or minibatches of one step."""
GROUP = 65_536
"""Samples of one task."""
PROCESSES = 16_384
"""Worker processes, GPUs or threads of one role."""
RETRIES = 1_000_000
"""Retries, restarts, and failures in a row."""
BYTES = 1 << 50
"""Bytes of a file or of a message."""
GIB = 1_048_576.0
"""GiB of memory."""
SECONDS = 1_000_000.0
"""Seconds of a deadline: eleven days. The limit of sockets and polls is 25 days."""
SEED = (1 << 63) - 1
"""Seeds."""
FACTOR = 1.0e6
"""Weights, scales, clips and clamps."""


def between(least: float, most: float) -> Any:
    """Return a validator that takes numbers from `least` to `most`, both included."""
    return and_(ge(least), le(most))


def above(bound: float, most: float) -> Any:
    """Return a validator that takes numbers above `bound`, up to `most`."""
    return and_(gt(bound), le(most))


def below(least: float, bound: float) -> Any:
    """Return a validator that takes numbers from `least`, below `bound`."""
    return and_(ge(least), lt(bound))


Items = list[tuple[object, Any, Any]]
_ALL: Any = type(and_())
_NUMBER: Any = type(ge(0))
_OPTIONAL: Any = type(optional(ge(0)))
_EACH: Any = type(deep_iterable(ge(0)))
_EACH_VALUE: Any = type(deep_mapping(value_validator=ge(0)))
"""Validator classes of attrs. attrs does not export their names."""


def items_of(validator: Any, value: Any) -> Items | None:
    """Return key, item and validator of each item that a validator checks. None: it checks the value itself."""
    if isinstance(validator, _OPTIONAL):
        return None if value is None else items_of(validator.validator, value)
    if isinstance(validator, _EACH) and isinstance(value, Sequence):
        return [(index, item, validator.member_validator) for index, item in enumerate(value)]
    if isinstance(validator, _EACH_VALUE) and isinstance(value, Mapping) and validator.key_validator is None:
        return [(key, item, validator.value_validator) for key, item in value.items()]
    return None


def unbounded(cls: type) -> list[str]:
    """Return the fields of a config class, and of classes inside it, whose numbers lack a lower or an upper bound."""
    return list(_unbounded(cls, ""))


def _unbounded(cls: type, prefix: str) -> Iterator[str]:
    attrs.resolve_types(cls)
    for field in attrs.fields(cls):
        if not field.init or "kind" in field.metadata:
            continue
        parts = set(_parts(field.type))
        if parts & {int, float}:
            signs = set(_signs(field.validator))
            if len(signs) < (1 if field.metadata.get("infinite") else 2):
                yield f"{prefix}{field.alias}"
        for inner in parts:
            if attrs.has(inner):
                yield from _unbounded(inner, f"{prefix}{field.alias}.")


def _parts(wanted: Any) -> Iterator[Any]:
    """Yield the plain types and classes inside a type."""
    if typing.get_origin(wanted) is typing.Literal:
        return
    arguments = typing.get_args(wanted)
    if not arguments:
        yield wanted
    elif typing.get_origin(wanted) in (Union, types.UnionType):
        for argument in arguments:
            yield from _parts(argument)
    else:
        yield from _parts(arguments[-1] if arguments[-1] is not Ellipsis else arguments[0])


def _signs(validator: Any) -> Iterator[str]:
    """Yield `<` for each finite upper bound of a validator, and `>` for each finite lower bound."""
    if isinstance(validator, (list, tuple, _ALL)):
        for one in validator._validators if isinstance(validator, _ALL) else validator:
            yield from _signs(one)
    elif isinstance(validator, _OPTIONAL):
        yield from _signs(validator.validator)
    elif isinstance(validator, _EACH):
        yield from _signs(validator.member_validator)
    elif isinstance(validator, _EACH_VALUE):
        yield from _signs(validator.value_validator)
    elif isinstance(validator, _NUMBER) and math.isfinite(validator.bound):
        yield validator.compare_op[0]
