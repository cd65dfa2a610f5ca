"""Whoever writes an old key or value is told the new one, at its path."""

from typing import Any, Literal

import pytest
from attrs import field, frozen

from whet.component import Component, Selection
from whet.config.renamed import renamed, renewed
from whet.config.structure import structure
from whet.errors import ConfigError


@frozen
class Section:
    """A section of a plugin, with keys that were renamed."""

    fruit: Literal["apple", "pear"] = field(metadata=renamed("meal", malus="apple"))
    count: int = field(default=1, metadata=renamed("number"))
    inner: "Inner | None" = field(default=None, metadata=renamed("core"))
    items: list["Inner"] = field(factory=list)


@frozen
class Inner:
    """A section inside."""

    meal: str = "no"
    colour: str = field(default="red", metadata=renamed(rot="red"))


def problems_of(document: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        structure(document, Section, None)
    return list(refused.value.problems)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"meal": "pear"}, "meal: was renamed; write fruit: pear"),
        ({"meal": "malus"}, "meal: was renamed; write fruit: apple"),
        ({"fruit": "malus"}, "fruit: the value malus was renamed; write apple"),
        ({"fruit": "pear", "number": 3}, "number: was renamed; write count: 3"),
        ({"fruit": "pear", "core": {"colour": "blue"}}, "core: was renamed; write inner"),
        ({"fruit": "pear", "core": None}, "core: was renamed; write inner: null"),
        ({"fruit": "pear", "items": [{}, {"colour": "rot"}]}, "items.1.colour: the value rot was renamed; write red"),
    ],
)
def test_an_old_key_or_value_is_one_problem_that_has_the_new_one(document, problem):
    assert problems_of(document) == [problem]


def test_an_old_key_beside_the_new_one_is_a_problem_too():
    assert problems_of({"fruit": "pear", "meal": "apple"}) == ["meal: was renamed; write fruit: apple"]


def test_a_key_of_today_may_have_the_name_that_another_one_had_before():
    @frozen
    class Swapped:
        share: float = 0.5
        colocate: bool = field(default=False, metadata=renamed("share"))

    assert structure({"share": 0.25}, Swapped, None) == Swapped(share=0.25)
    assert structure({"share": 0.25}, Swapped, None, renew=True) == Swapped(share=0.25)
    assert renewed({"share": 0.25}, Swapped()) == {"share": 0.25}


def test_new_keys_and_values_are_taken_as_they_are():
    made = structure({"fruit": "apple", "inner": {"colour": "rotten"}}, Section, None)
    assert made == Section("apple", inner=Inner(colour="rotten"))


def test_what_an_earlier_version_wrote_is_read_with_the_names_of_today() -> None:
    here = Section("apple", inner=Inner(), items=[Inner()])
    before = {"meal": "malus", "number": 2, "core": {"colour": "rot"}, "items": [{"colour": "rot"}, {"colour": "rot"}]}
    now = {"fruit": "apple", "count": 2, "inner": {"colour": "red"}, "items": [{"colour": "red"}, {"colour": "rot"}]}
    assert renewed({**before, "files": {"meal": 1}}, here) == {**now, "files": {"meal": 1}}
    assert renewed(now, here) == now
    assert renewed({"a": before}, {"a": Selection("losses", Component("x", Section, "x:Y"), here)}) == {"a": now}
    assert renewed(before, None) == before


def test_what_whet_wrote_itself_is_structured_with_the_names_of_today() -> None:
    before = {"meal": "malus", "number": 2, "core": {"colour": "rot"}, "items": [{"colour": "rot"}]}
    made = structure(before, Section, None, renew=True)
    assert made == Section("apple", 2, Inner(colour="red"), [Inner(colour="red")])
    overridden = {**before, "fruit": "pear", "inner": {"meal": "yes"}}
    assert structure(overridden, Section, None, renew=True) == Section("pear", 2, Inner("yes", "red"), made.items)
