"""Functions as tools: their schema, the check of arguments, and what they return or raise."""

import asyncio
from pathlib import Path

import pytest

from whet.errors import PluginError
from whet_env_tools.hosted.functions import Functions, as_text, function_tool, read_docstring

FILE = Path(__file__).with_name("some_tools.py")


def tool(name):
    return function_tool(f"{FILE}:{name}")


def called(name, arguments, episode=None):
    functions = Functions([f"{FILE}:{name}"])
    return asyncio.run(functions.call(name, arguments, episode or {}))


def test_the_schema_is_that_of_signature_and_docstring():
    found = tool("weather")
    assert found.name == "weather"
    assert found.description == "Return the weather of a city.\n\nIt is always fine."
    assert found.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city, in English."},
            "unit": {"enum": ["C", "F"], "default": "C", "description": "Unit of temperature."},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert tool("slowly").parameters["properties"]["number"]["description"] == "Any number."


def test_schemas_of_nested_types_are_valid_and_say_what_the_function_takes():
    import jsonschema

    schema = tool("distance").parameters
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    path = [{"x": 0, "y": 0}, {"x": 3, "y": 4}]
    for arguments, text in [
        ({"points": path}, "5.0"),
        ({"points": path, "options": {"squared": True}, "scale": 2}, "50.0"),
    ]:
        assert validator.is_valid(arguments)
        assert called("distance", arguments).text == text
    for arguments in ({"points": [{"x": 0}]}, {"points": path, "scale": 0}, {}, {"points": path, "more": 1}):
        assert not validator.is_valid(arguments)
        assert called("distance", arguments).error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "missing required field `city`"),
        ({"city": 3}, "Expected `str`, got `int` - at `$.city`"),
        ({"city": "Rome", "unit": "K"}, "Invalid enum value 'K' - at `$.unit`"),
        ({"city": "Rome", "town": "Rome"}, "unknown field `town`"),
    ],
)
def test_wrong_arguments_are_answered_with_what_is_wrong(arguments, words):
    answer = called("weather", arguments)
    assert answer.error
    assert answer.text.startswith("Wrong arguments: ")
    assert words in answer.text


def test_results_are_text():
    assert called("weather", {"city": "Rome"}).text == '{"city":"Rome","temperature":20,"days":null}'
    assert called("slowly", {"number": 4}).text == "8"
    assert [as_text(value) for value in (None, "a\n", 3, 2.5, True, ["ä"])] == ["", "a\n", "3", "2.5", "true", '["ä"]']
    assert [as_text(value) for value in (float("nan"), -float("inf"))] == ["nan", "-inf"]
    assert as_text(object()).startswith("<object")


def test_what_a_function_raises_is_an_answer():
    assert called("raises", {"text": "x"}).text == "LookupError: nothing about x"
    assert called("raises", {"text": "x"}).error
    assert called("exits", {"code": 3}).text == "SystemExit: 3"


def test_an_iterator_that_ends_in_a_function_is_an_answer_and_blocks_nothing():
    functions = Functions([f"{FILE}:ends"])

    async def both():
        async with asyncio.timeout(10):
            return [(await functions.call("ends", {"name": name}, {})).text for name in ("bob", "ann")]

    assert asyncio.run(both()) == ["StopIteration: ", "5"]


def test_the_episode_is_no_argument_of_the_model():
    assert list(tool("remember").parameters["properties"]) == ["word"]
    assert called("remember", {"word": "a", "episode": {}}).error
    given = {"data": {"question": "Q"}, "split": "train", "state": {"words": ["z"]}}
    answer = called("remember", {"word": "a"}, given)
    assert (answer.text, answer.state) == ("Q train z a", {"words": ["z", "a"]})


def test_a_state_that_cannot_be_kept_is_an_error_of_the_author_and_no_answer():
    given = {"data": {"question": "Q"}, "split": "train", "state": {"words": ["z"], "seen": {1}}}
    with pytest.raises(PluginError, match=r"episode\.state of the function remember cannot be written as JSON"):
        called("remember", {"word": "a"}, given)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_words", "it has no docstring"),
        ("no_type", "its parameter 'number' has no type"),
        ("rest", "its parameter 'numbers' cannot be passed by name"),
        ("not_a_function", "is 3, wanted a function"),
        ("absent", "cannot be imported"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_by_name(name, words):
    with pytest.raises(PluginError, match=words):
        tool(name)


def test_docstrings_are_read_in_two_styles():
    google = (
        "Do it.\n\nArgs:\n    one: First\n        and more.\n    two (int): Second: with a colon.\n\nReturns:\n    x: y"
    )
    assert read_docstring(google) == ("Do it.", {"one": "First and more.", "two": "Second: with a colon."})
    sphinx = "Do it.\n\n:param one: First\n    and more.\n:param int two: Second.\n:returns: x"
    assert read_docstring(sphinx) == ("Do it.", {"one": "First and more.", "two": "Second."})
