"""The string under a field is its documentation."""

import importlib
from typing import Any, Literal

import pytest
from attrs import Factory, field, frozen, validators

from whet.config.bounds import above, below, between
from whet.config.sections import Config, RunSection
from whet.errors import PluginError
from whet.plugins.registry import Registry
from whet_start.explain import FieldDoc, describe, field_docs, sections, selections, summary


@frozen
class Parent:
    first: int
    """Of the parent,
    on two lines."""
    undocumented: str = ""


@frozen
class Child(Parent):
    """A child.

    With more to say.
    """

    second: Literal["a", "b"] = "a"
    """Of the child."""
    hidden: int = field(default=1, init=False)
    """Cannot be given."""
    things: list[float] = Factory(lambda: [1.0])
    """A list."""
    derived: int = field(default=Factory(lambda self: self.first, takes_self=True))
    """Follows the first."""
    either: int | None = None
    """One | the other."""
    inner: Parent | None = None
    """Inside."""


@frozen
class Numbers:
    bounded: int = field(default=1, validator=between(1, 9))
    pair: tuple[float, float] = field(default=(0.1, 0.2), validator=validators.deep_iterable(below(0, 1)))
    named: dict[str, int] = field(factory=dict, validator=validators.deep_mapping(value_validator=between(0, 9)))
    perhaps: float | None = field(default=None, validator=validators.optional(above(0, 9)))


@frozen
class Unresolved:
    lost: "NoSuchType" = 1  # type: ignore[name-defined]  # noqa: F821


def test_a_config_whose_types_do_not_exist_is_named() -> None:
    with pytest.raises(PluginError, match=r"types of .*Unresolved cannot be resolved: name 'NoSuchType'"):
        describe(Unresolved)


def test_every_key_has_its_type_default_and_meaning() -> None:
    assert describe(Child) == [
        FieldDoc("first", "an integer", "required", "Of the parent, on two lines."),
        FieldDoc("undocumented", "text", "''", ""),
        FieldDoc("second", "one of 'a', 'b'", "a", "Of the child."),
        FieldDoc("things", "a list of numbers", "[1.0]", "A list."),
        FieldDoc("derived", "an integer", "computed", "Follows the first."),
        FieldDoc("either", "an integer or null", "null", "One | the other."),
        FieldDoc("inner", "a mapping or null", "null", "Inside."),
        FieldDoc("inner.first", "an integer", "required", "Of the parent, on two lines."),
        FieldDoc("inner.undocumented", "text", "''", ""),
    ]
    assert summary(Child) == "A child."


def test_components_are_described_by_their_kind(offers: Registry) -> None:
    loop = offers.find("algorithms", "loop").component.config
    by_name = {doc.name: doc for doc in describe(loop)}
    assert by_name["loss"] == FieldDoc("loss", "a loss", "clip", "What is minimised.", "losses")
    assert by_name["filters"] == FieldDoc("filters", "a list of filters", "[]", "What is dropped.", "filters")
    trainer = offers.find("backends", "trainer").component.config
    assert [(doc.name, doc.default) for doc in describe(trainer)] == [("optimizer", ""), ("optimizer.lr", "1.0e-06")]


def test_every_key_of_core_is_documented() -> None:
    assert [doc.name for doc in describe(Config) if not doc.doc] == []


def test_inline_components_are_shown_by_use() -> None:
    docs = {doc.name: doc for doc in describe(Config)}
    assert docs["environments.N.use"].type == "an environment"
    assert docs["generator"].type == "a generator or null"
    assert docs["run.folder"].default == "required"


def test_sections_are_found_by_their_paths() -> None:
    found = sections()
    assert found["run"] is RunSection
    assert {"cluster.deadlines", "environments", "data.train"} <= set(found)
    assert selections()["algorithm"] == "algorithms"


def test_a_class_without_a_source_has_no_docs() -> None:
    namespace: dict[str, Any] = {}
    exec("from attrs import frozen\n@frozen\nclass Made:\n    x: int = 1", namespace)
    assert field_docs(namespace["Made"]) == {}


def test_bounds_are_shown() -> None:
    assert {doc.name: doc.allowed for doc in describe(Numbers)} == {
        "bounded": "at least 1, at most 9",
        "pair": "each item at least 0, less than 1",
        "named": "each value at least 0, at most 9",
        "perhaps": "more than 0, at most 9, or null",
    }


def test_the_path_that_it_had_in_core_leads_here_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"whet\.config\.explain has moved to whet_start\.explain"):
        old = importlib.import_module("whet.config.explain")
    assert old.describe is describe
