"""Calls that a request forces, in every dialect: the schema that the generator gets, and what is made of its text."""

import asyncio
import json
from typing import Any

import aiohttp
import jsonschema
import pytest

from whet.config.sections import EndpointSection
from whet.data.records import Sampling
from whet.rollout.gate import Gate
from whet_endpoint.chat import read_chat
from whet_endpoint.errors import ApiError
from whet_endpoint.forced import read_calls
from whet_endpoint.listener import Listener
from whet_endpoint.requests import Rules
from whet_endpoint.run import RunResponder
from whet_testing.fakes import ByteChat, FakeGenerator

RULES = Rules(
    Sampling(max_tokens=300, stop_tokens=ByteChat.stop_tokens), fixed=False, extras=frozenset({"schema", "progress"})
)
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SHARED = {"properties": {"at": {"$ref": "#/$defs/Point"}}, "$defs": {"Point": {"type": "array", "maxItems": 2}}}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
MOVE: Any = {"type": "function", "function": {"name": "move", "parameters": SHARED, "strict": True}}
HELLO = [{"role": "user", "content": "3+4?"}]
THIS = {"type": "function", "function": {"name": "add"}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def asked(rules: Rules = RULES, **fields: Any) -> Any:
    return read_chat({"messages": HELLO, "tools": [ADD, MOVE], **fields}, rules)


@pytest.mark.parametrize(
    ("fields", "calls", "allowed"),
    [
        ({"tool_choice": "required"}, [call("add", a=3), call("move", at=[1, 2])], True),
        ({"tool_choice": "required"}, [], False),
        ({"tool_choice": "required"}, [call("add", a="3")], False),
        ({"tool_choice": "required"}, [call("move", at=[1, 2, 3])], False),
        ({"tool_choice": "required"}, [call("other")], False),
        ({"tool_choice": "required"}, [{**call("add", a=3), "more": 1}], False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [call("add", a=3)], True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [call("add", a=3)] * 2, False),
        ({"tool_choice": THIS}, [call("add", a=3)], True),
        ({"tool_choice": THIS}, [call("move", at=[1, 2])], False),
    ],
)
def test_the_generator_is_held_to_calls_of_the_tools(fields: Any, calls: list[Any], allowed: bool) -> None:
    request = asked(**fields)
    held = jsonschema.Draft202012Validator(json.loads(request.sampling.schema))
    assert held.is_valid(calls) == allowed
    assert (request.reads_calls, request.forces_calls, request.ignored) == (True, True, ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "absent"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tool_choice": "required", "tools": [MOVE, {"type": "function", "function": {"name": "b", "parameters": {
                "$defs": {"Point": {"type": "object"}}}}}]},
            "tools",
        ),
        (
            {"tool_choice": "required", "tools": [
                {"type": "function", "function": {"name": "b", "parameters": {"$defs": [1]}}}]},
            "tools",
        ),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_forced_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_where_a_text_cannot_be_held_to_a_schema_a_forced_call_is_refused_or_left_out() -> None:
    unable = Rules(RULES.sampling, fixed=False)
    with pytest.raises(ApiError, match="cannot hold a text to a JSON schema of calls"):
        asked(unable, tool_choice="required", tools=[ADD])
    with pytest.raises(ApiError, match="sampled freely: it cannot be made to call"):
        asked(Rules(RULES.sampling, fixed=True, extras=RULES.extras), tool_choice=THIS, tools=[ADD])
    found = asked(Rules(RULES.sampling, fixed=False, lenient=True), tool_choice="required", tools=[ADD])
    assert (found.sampling.schema, found.reads_calls, found.forces_calls) == ("", True, False)
    assert found.ignored == ("tool_choice",)


CALLS = [call("add", a=3), call("add", a=4)]
OF_RESPONSES = {"type": "function", **ADD["function"]}
OF_MESSAGES = {"name": "add", "input_schema": NUMBERS}
DIALECTS = {
    "/chat/completions": {"messages": HELLO, "tools": [ADD], "tool_choice": THIS},
    "/responses": {"input": HELLO, "tools": [OF_RESPONSES], "tool_choice": {"type": "function", "name": "add"}},
    "/messages": {
        "messages": HELLO, "max_tokens": 99, "tools": [OF_MESSAGES], "tool_choice": {"type": "tool", "name": "add"}
    },
}  # fmt: skip


async def answered(generator: FakeGenerator, path: str, **fields: Any) -> str:
    listener = Listener(EndpointSection())
    responder = RunResponder(generator, ByteChat(), Gate(), RULES, 0, 0, None)
    async with listener.open(responder, tuple) as address, aiohttp.ClientSession() as session:
        headers = {"x-api-key": address.api_key}
        async with session.post(address.base_url + path, json=DIALECTS[path] | fields, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.text()


def found_in(path: str, told: dict[str, Any]) -> tuple[list[Any], str]:
    """Return the calls of a response, and why it ended."""
    if path == "/chat/completions":
        (choice,) = told["choices"]
        assert choice["message"]["content"] is None
        made = [one["function"] for one in choice["message"]["tool_calls"]]
        return [call(one["name"], **json.loads(one["arguments"])) for one in made], choice["finish_reason"]
    if path == "/responses":
        assert told["tool_choice"] == {"type": "function", "name": "add"}
        return [call(one["name"], **json.loads(one["arguments"])) for one in told["output"]], told["status"]
    return [call(one["name"], **one["input"]) for one in told["content"]], told["stop_reason"]


@pytest.mark.parametrize(
    ("path", "end"), [("/chat/completions", "tool_calls"), ("/responses", "completed"), ("/messages", "tool_use")]
)
def test_forced_calls_are_calls_in_every_dialect(path: str, end: str) -> None:
    generator = FakeGenerator(json.dumps(CALLS))
    assert found_in(path, json.loads(asyncio.run(answered(generator, path)))) == (CALLS, end)
    (request,) = generator.requests
    assert jsonschema.Draft202012Validator(json.loads(request.sampling.schema)).is_valid(CALLS)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_stream_sends_forced_calls_whole_and_never_as_text(path: str) -> None:
    text = asyncio.run(answered(FakeGenerator(json.dumps(CALLS)), path, stream=True))
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    shown = json.dumps(events)
    assert shown.count('{\\"a\\": 3}') >= 1
    assert 'arguments\\": {' not in shown, "the text that was held to the schema"


def test_calls_that_the_limit_cut_are_text() -> None:
    generator = FakeGenerator(json.dumps(CALLS)[:-5])
    told = json.loads(asyncio.run(answered(generator, "/chat/completions")))
    assert told["choices"][0]["message"]["content"] == json.dumps(CALLS)[:-5]
    tools = asked(tool_choice=THIS).tools
    for text in ("", "3", "{}", '["add"]', '[{"name": "add"}]', '[{"name": "x", "arguments": {}}]', "[" * 100_000):
        assert read_calls(text, tools) == ()
