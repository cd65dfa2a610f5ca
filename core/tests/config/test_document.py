"""YAML is read the way people mean it, and what is no YAML is named with its place."""

import contextlib
import datetime
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from whet.config.document import read_file, read_text, to_text
from whet.errors import ConfigError


def read(text: str) -> Any:
    document = read_text(text, "it.yaml")
    assert document.problems == ()
    return document.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E6", 1e6), ("1.0e-6", 1e-6), ("1.e+3", 1000.0), (".5", 0.5), ("-2.5", -2.5),
        (".inf", math.inf), ("-.inf", -math.inf), ("3", 3), ("-3", -3), ("+3", 3), ("1_000", 1000), ("010", 10),
        ("0x1F", 31), ("0o17", 15), ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("no", "no"), ("on", "on"), ("2024-01-01", "2024-01-01"), ("1:30", "1:30"), ("1.2.3", "1.2.3"), ("e5", "e5"),
        ("'8'", "8"), ("1e", "1e"), ("_1", "_1"), (".", "."), ("-", [None]), ("=", "="),
    ],
)  # fmt: skip
def test_scalars_are_what_people_mean(text: str, value: object) -> None:
    found = read(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["0x", "0o9", "1__", "1_000.5", "-_", "0b1", "+.inf", "+0x1F", "1e5_0", "_._"])
def test_odd_scalars_are_read_without_complaint(text: str) -> None:
    assert isinstance(read(text), (str, int, float))


def test_keys_that_are_merged_in_may_be_overridden() -> None:
    assert read("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")["b"] == {"x": 1, "y": 3}


def test_a_key_that_is_given_twice_is_named_with_both_lines() -> None:
    document = read_text("run:\n  steps: 1\n  seed: 2\n  steps: 3\nmodel: {}\nrun: {}\n", "it.yaml")
    assert sorted(document.problems) == [
        "it.yaml:4: the key 'steps' is given twice, first in line 2",
        "it.yaml:6: the key 'run' is given twice, first in line 1",
    ]


def test_a_key_that_is_given_twice_in_one_line_is_found() -> None:
    assert len(read_text("{a: 1, a: 2}", "it.yaml").problems) == 1


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: [1, 2\nb: 3", "it.yaml:2:"),
        ("a: b: c", "it.yaml:1:5: mapping values are not allowed here"),
        ("a: 1\n\tb: 2", "it.yaml:2:1: "),
        ("a: *b", "it.yaml:1:4: found undefined alias 'b'"),
        ("a: 'x", "it.yaml:1:6: "),
        ("a: !!python/object:os.system {}", "the tag 'tag:yaml.org,2002:python/object:os.system' is not allowed"),
        ("a: !mine 3", "it.yaml:1:4: the tag '!mine' is not allowed"),
        ("&a [*a]", "recursive"),
        ("{[1]: 2}", "unhashable key"),
        ("a: 1\n---\nb: 2", "it.yaml:2:1: "),
        ("a: " + "9" * 5000, "so many digits"),
        ("a: !!int x", "it.yaml:1:4: "),
        ("a: !!bool x", "it.yaml:1:4: "),
        ("a: !!float x", "it.yaml:1:4: "),
        ("a: \x07", "a character that YAML does not allow"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_yaml_is_named_with_its_place(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_text(text, "it.yaml")
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    for name, reason in [
        ("none.yaml", "there is no file"),
        ("latin.yaml", ":2: the file is not UTF-8"),
        (".", "cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            read_file(tmp_path / name)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_no_text_raises_anything_but_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        read_text(text, "it.yaml")


@given(st.text(alphabet="ab1.:-_+{}[]&*!<>|'\"#\n ,~0xoe", max_size=40))
def test_no_yaml_like_text_raises_anything_but_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        read_text(text, "it.yaml")


builtins = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(builtins)
def test_what_is_written_is_read_back(value: object) -> None:
    assert read(to_text(value)) == value
    assert yaml.safe_load(to_text(value)) == value


@pytest.mark.parametrize(
    "text", ["1e5", "0x1F", "no", "2024-01-01", "null", "1:30", "0o7", "", "<<", "=", "a\x85b", "ä"]
)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert read(to_text({text: [text]})) == {text: [text]}
    assert yaml.safe_load(to_text([text])) == [text]


def test_a_list_in_two_places_is_written_twice() -> None:
    same = [1]
    assert to_text({"a": same, "b": same}) == "a:\n- 1\nb:\n- 1\n"


def test_a_date_stays_text() -> None:
    assert not isinstance(read("a: 2024-01-01")["a"], datetime.date)
