"""Every number of a config has bounds."""

import math
from typing import Any

import pytest
from attrs import field, frozen, validators

from whet.config.bounds import above, below, between
from whet.config.sections import Config
from whet.config.structure import structure
from whet.errors import ConfigError
from whet_testing.field_docs import unbounded


@frozen
class Inner:
    open: float = field(default=1.0, validator=validators.gt(0))


@frozen
class Numbers:
    bounded: int = field(default=1, validator=between(1, 9))
    share: float = field(default=0.5, validator=[validators.ge(0), validators.le(1)])
    pair: tuple[float, float] = field(default=(0.1, 0.2), validator=validators.deep_iterable(below(0, 1)))
    named: dict[str, int] = field(factory=dict, validator=validators.deep_mapping(value_validator=between(0, 9)))
    perhaps: float | None = field(default=None, validator=validators.optional(above(0, 9)))
    cap: float = field(default=2.0, validator=validators.gt(0), metadata={"infinite": True})
    floor: float = field(default=2.0, validator=validators.le(9), metadata={"infinite": True})
    unlimited: float = field(default=2.0, metadata={"infinite": True})
    words: list[str] = field(factory=list)
    bare: int = 3
    loose: list[int] = field(factory=list, validator=validators.deep_iterable(validators.ge(0)))
    endless: float = field(default=0.0, validator=[validators.ge(0), validators.lt(math.inf)])
    inner: Inner = field(factory=Inner)


def problems(document: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        structure(document, Numbers, None)
    return raised.value.problems


def test_numbers_without_both_bounds_are_found() -> None:
    assert unbounded(Numbers) == ["unlimited", "bare", "loose", "endless", "inner.open"]


def test_every_number_of_core_has_bounds() -> None:
    assert unbounded(Config) == []


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused_unless_the_field_takes_it(value: float) -> None:
    for key in ("share", "perhaps", "inner"):
        document = {"open": value} if key == "inner" else value
        path = "inner.open" if key == "inner" else key
        assert problems({key: document}) == [f"{path}: wanted a finite number, found {value}"]
    assert problems({"pair": [0.1, value]}) == [f"pair.1: wanted a finite number, found {value}"]
    if value == math.inf:
        assert structure({"cap": value}, Numbers, None).cap == math.inf
    else:
        assert problems({"cap": value})[0].startswith("cap: ")
    if value == -math.inf:
        assert structure({"floor": value}, Numbers, None).floor == -math.inf
    else:
        assert problems({"floor": value})[0].startswith("floor: ")


def test_an_item_that_is_out_of_bounds_is_named() -> None:
    assert problems({"named": {"a": 3, "b": 10}, "pair": [0.0, 1.0], "loose": [1, -1]}) == [
        "pair.1: must be < 1: 1.0",
        "named.b: must be <= 9: 10",
        "loose.1: must be >= 0: -1",
    ]
