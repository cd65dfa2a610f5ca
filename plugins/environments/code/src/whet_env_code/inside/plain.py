"""Plain data as JSON, for messages between a program and the tests that grade it.

    None, bool, int, str, list       as in JSON
    float                            {"f": repr}, so that nan and inf cross, too
    bytes, complex, tuple            {"b": hex}, {"c": [..]}, {"t": [..]}
    set, frozenset, dict             {"s": [..]}, {"z": [..]}, {"d": [[key, value], ..]}

A value of a subclass crosses as its plain class: no method of a program's own class ever runs beside the tests.
"""

from collections.abc import Callable, Iterable
from typing import Any


def packed(value: Any) -> Any:
    """Return a value in a form for JSON. Raises `TypeError` if it is not plain data."""
    if value is None or value is True or value is False:
        return value
    for kind, pack in _PACKERS:
        if isinstance(value, kind):
            return pack(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def unpacked(held: Any) -> Any:
    """Return the value. Raises `ValueError` or `TypeError` if the form is invalid."""
    if isinstance(held, list):
        return [unpacked(item) for item in held]
    if not isinstance(held, dict):
        return held
    ((tag, inner),) = held.items()
    return _UNPACKERS[tag](inner)


def _items(values: Iterable[Any]) -> list[Any]:
    return [packed(item) for item in values]


_PACKERS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, lambda value: int.__int__(value)),
    (float, lambda value: {"f": float.__repr__(value)}),
    (str, lambda value: str.__str__(value)),
    (bytes, lambda value: {"b": bytes.hex(value)}),
    (complex, lambda value: {"c": [packed(value.real), packed(value.imag)]}),
    (list, lambda value: _items(list.__iter__(value))),
    (tuple, lambda value: {"t": _items(tuple.__iter__(value))}),
    (set, lambda value: {"s": _items(set.__iter__(value))}),
    (frozenset, lambda value: {"z": _items(frozenset.__iter__(value))}),
    (dict, lambda value: {"d": [[packed(key), packed(item)] for key, item in dict.items(value)]}),
)
_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    "f": float,
    "b": bytes.fromhex,
    "c": lambda held: complex(*map(unpacked, held)),
    "t": lambda held: tuple(map(unpacked, held)),
    "s": lambda held: set(map(unpacked, held)),
    "z": lambda held: frozenset(map(unpacked, held)),
    "d": lambda held: {unpacked(key): unpacked(item) for key, item in held},
}
