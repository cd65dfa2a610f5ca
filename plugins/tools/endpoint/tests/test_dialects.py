"""The dialects Responses and Messages: what goes in, what comes out, and that the clients of others understand it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import numpy as np
import pytest
from attrs import evolve

from whet.config.sections import EndpointSection
from whet.data.messages import Call, Image, Message, Text
from whet.data.records import Completion, Episode, Progress, Request, Sampling, Task
from whet.interfaces.environment import Model
from whet.interfaces.generator import listener
from whet.plugins.endpoints import InstalledEndpoints
from whet.rollout.recorded import Assignment
from whet.rollout.routing import Route
from whet_endpoint.anthropic_messages import MessagesDialect
from whet_endpoint.errors import ApiError
from whet_endpoint.memory import Memory
from whet_endpoint.requests import Rules
from whet_endpoint.responses import ResponsesDialect
from whet_testing.fakes import FakeGenerator
from whet_testing.playing import AltChat, AltTokens, alt, make_player

BASE = Sampling(max_tokens=100, temperature=0.7, stop_tokens=(2,))
EPISODE = Rules(BASE, fixed=True)
LENIENT = Rules(BASE, fixed=True, lenient=True)
RUN = Rules(BASE, fixed=False, extras=frozenset({"likeliest", "schema"}))
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
ADD = {"type": "function", "name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}}
TOOL = {"name": "add", "description": "a + b", "input_schema": {"type": "object", "properties": {}}}
HELLO = [{"role": "user", "content": "hello"}]


def responses(rules: Rules = EPISODE, memory: Memory | None = None, **fields: Any) -> Any:
    return ResponsesDialect().read({"input": "hello", **fields}, rules, memory or Memory())


def messages(rules: Rules = EPISODE, **fields: Any) -> Any:
    return MessagesDialect().read({"max_tokens": 50, "messages": HELLO, **fields}, rules, Memory())


def test_items_are_messages() -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "3+"}, {"type": "input_text", "text": "4?"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "status": None,
        },
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        {"type": "function_call", "id": "f", "call_id": "c1", "name": "add", "arguments": '{"a": 3}', "extra": [1]},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]},
    ]
    calls = (Call("c1", "add", '{"a": 3}'), Call("c2", "add", "{}"))
    assert responses(input=items, instructions="count").prompt == (
        Message("system", "count"), Message("system", "be brief"), Message("user", (Text("3+"), Text("4?"))),
        Message("assistant", "wait", calls, reasoning="hm"), Message("tool", "7", answers="c1"),
        Message("tool", "8", answers="c2"),
    )  # fmt: skip


def test_turns_of_the_assistant_that_follow_each_other_stay_apart() -> None:
    said = [{"type": "message", "role": "assistant", "content": text} for text in ("a", "b")]
    found = responses(input=[*HELLO, *said, {"role": "user", "content": "c"}]).prompt
    assert [message.text for message in found] == ["hello", "a", "b", "c"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [*HELLO, {"role": "assistant", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"instructions": 3}, "instructions"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"temperature": 0.1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_responses_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        responses(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "Well"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "7"}]}]}, "messages"),
        ({"messages": [*HELLO, {"role": "user", "content": []}]}, "messages"),
        ({"system": 3}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": 3}, "top_k"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel_tool_calls"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_messages_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_blocks_are_messages() -> None:
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "3+4?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "wait"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 3}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "7"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    asked = messages(messages=talk, system=[{"type": "text", "text": "be brief"}], tools=[TOOL], stop_sequences=["END"])
    assert asked.prompt == (
        Message("system", "be brief"), Message("user", "3+4?"),
        Message("assistant", "wait", (Call("c1", "add", '{"a": 3}'),), reasoning="hm"),
        Message("tool", "7", answers="c1"), Message("user", "so?"),
    )  # fmt: skip
    assert (asked.sampling.max_tokens, asked.stops, asked.reads_calls) == (50, ("END",), True)
    assert json.loads(asked.tools[0])["function"]["parameters"] == TOOL["input_schema"]


def test_what_is_not_supported_can_be_left_out_with_a_note() -> None:
    fields = {"temperature": 0.1, "tools": [ADD, {"type": "web_search"}], "tool_choice": "required", "odd \n": 1}
    found = responses(LENIENT, model="gpt-9", text={"format": {"type": "json_object"}}, **fields)
    assert found.sampling == BASE
    assert len(found.tools) == 1
    assert sorted(found.ignored) == ["?", "model", "temperature", "text", "tool_choice", "tools"]


def test_a_budget_of_thinking_and_a_verbosity_are_left_out_with_a_note() -> None:
    assert messages(thinking={"type": "enabled", "budget_tokens": 1024}).ignored == ("thinking.budget_tokens",)
    assert responses(LENIENT, text={"verbosity": "low"}).ignored == ("text.verbosity",)


def test_strict_is_the_default_of_clients_of_responses_and_left_out_with_a_note() -> None:
    found = responses(tools=[{**ADD, "strict": True}])
    assert (found.ignored, found.asked["tools"][0]["strict"]) == (("strict",), False)


def test_outside_of_episodes_a_schema_is_passed_on_to_generators_that_can_hold_to_it() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    assert json.loads(responses(RUN, text={"format": form}).sampling.schema) == schema
    with pytest.raises(ApiError, match="this generator cannot"):
        responses(evolve(RUN, extras=frozenset()), text={"format": form})
    assert responses(RUN, top_logprobs=3).likeliest == 3


def test_the_memory_of_responses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, talk = Memory(), (Message("user", "x" * 10),)
    monkeypatch.setattr("whet_endpoint.memory.MOST_CHARACTERS", 35)
    for i in range(5):
        memory.keep(f"resp_{i}", talk)
    assert [memory.find(f"resp_{i}") is not None for i in range(5)] == [False, False, True, True, True]
    monkeypatch.setattr("whet_endpoint.memory.MOST_RESPONSES", 1)
    memory.keep("resp_5", talk)
    assert [memory.find(f"resp_{i}") for i in (4, 5)] == [None, talk]


def test_the_memory_of_responses_counts_images_and_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    monkeypatch.setattr("whet_endpoint.memory.MOST_CHARACTERS", 30)
    for i, message in enumerate([Message("user", [Image("x" * 20)]), Message("assistant", "", reasoning="y" * 20)]):
        memory.keep(f"resp_{i}", (message,))
    assert memory.find("resp_0") is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"a": [float("nan")]}}, "metadata"),
        ({"user": float("inf")}, "user"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"maximum": float("nan")}}]}, "tools"),
    ],
)
def test_what_json_does_not_have_is_not_repeated(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match="no NaN") as caught:
        responses(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_bodies_that_nest_too_deeply_are_refused() -> None:
    def bodies(depth: int) -> list[tuple[str, str]]:
        deep = '{"k": ' * depth + "1" + "}" * depth
        tool = f'{{"type": "function", "name": "f", "parameters": {deep}}}'
        used = f'{{"role": "assistant", "content": [{{"type": "tool_use", "id": "i", "name": "f", "input": {deep}}}]}}'
        return [
            ("/responses", f'{{"input": "a", "metadata": {deep}}}'),
            ("/responses", f'{{"input": "a", "tools": [{tool}]}}'),
            ("/messages", f'{{"messages": [{used}, {{"role": "user", "content": "b"}}]}}'),
            ("/chat/completions", f'{{"messages": {deep}}}'),
        ]

    async def agent(client: Client) -> None:
        headers = {"Authorization": f"Bearer {client.address.api_key}"}
        for depth in (300, *range(850, 980)):  # near the end of Python's own limit, every frame counts
            for path, body in bodies(depth):
                async with client.session.post(client.address.base_url + path, data=body, headers=headers) as response:
                    assert response.status == 400, (path, depth)
        await client.post("/responses", {"input": "a"})

    generator = FakeGenerator("yes")
    play(agent, generator)
    assert len(generator.requests) == 1


@pytest.mark.parametrize(
    "message",
    [
        Message("tool", "", answers="x" * 20),
        Message("assistant", "", (Call("x" * 20, "f", "{}"),)),
        Message("assistant", "", (Call("", "x" * 20, "{}"),)),
    ],
)
def test_the_memory_of_responses_counts_names_and_ids(message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    monkeypatch.setattr("whet_endpoint.memory.MOST_CHARACTERS", 30)
    for name in ("resp_0", "resp_1"):
        memory.keep(name, (message,))
    assert (memory.find("resp_0"), memory.find("resp_1")) == (None, (message,))


def test_the_memory_of_responses_counts_empty_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, talk = Memory(), (Message("user", ""),) * 4
    monkeypatch.setattr("whet_endpoint.memory.MOST_PARTS", 16)
    for i in range(5):
        memory.keep(f"resp_{i}", talk)
    assert [memory.find(f"resp_{i}") is not None for i in range(5)] == [False, False, False, True, True]


# Episodes over HTTP

Agent = Callable[["Client"], Awaitable[Any]]


class ThinkChat(AltChat):
    """A template that drops the reasoning of earlier turns, as that of Qwen 3."""

    def render(self, conversation: Any, *, generation_prompt: bool = False) -> str:
        kept = [evolve(m, content=m.text.rpartition("</think>")[2].lstrip()) for m in conversation]
        return super().render(tuple(kept), generation_prompt=generation_prompt)


class Client:
    """What an agent without a library asks with."""

    def __init__(self, address: Any, session: Any) -> None:
        self.address, self.session = address, session

    async def post(self, path: str, body: Any, key: Mapping[str, str] | None = None, root: str = "/v1") -> Any:
        url = self.address.base_url.removesuffix("/v1") + root + path
        headers = {"Authorization": f"Bearer {self.address.api_key}"} if key is None else key
        async with self.session.post(url, json=body, headers=headers) as response:
            found = await response.json() if "json" in response.content_type else events(await response.text())
            return response.status, found, response.headers


def events(text: str) -> list[tuple[str, Any]]:
    """Return the events of a stream: (name, data)."""
    found = []
    for block in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((lines.get("event", ""), json.loads(lines["data"]) if lines["data"] != "[DONE]" else None))
    return found


def play(agent: Agent, generator: Any, chat: Any = None, max_context: int = 0, **section: Any) -> Episode:
    class Foreign:
        reward_weights: Mapping[str, float] = {}

        def tasks(self, split: str) -> list[Task]:
            return [Task("hello")]

        async def run(self, task: Task, model: Model) -> Mapping[str, float]:
            async with model.endpoint() as address, aiohttp.ClientSession() as session:
                await agent(Client(address, session))
            return {"done": 1.0}

        def close(self) -> None:
            pass

    assignment = Assignment(Route("foreign", Foreign(), "train"), Task("hello"), 3, 7)
    endpoints = InstalledEndpoints(EndpointSection(**section), extras=frozenset({"progress", "likeliest"}))
    sampling = Sampling(max_tokens=300)
    player = make_player(
        generator, chat, sampling=sampling, endpoints=endpoints, deadline_seconds=60.0, max_context=max_context
    )
    return asyncio.run(player.episode(assignment, 0))


MANDATORY = {"id", "object", "created_at", "model", "output", "parallel_tool_calls", "tool_choice", "tools"}


def test_an_agent_of_nemo_gym_plays_with_the_key_in_its_path_and_reads_the_tokens() -> None:
    """Its loop: `input` and `tools` alone, no key and no model; the output goes back with its token fields."""

    async def agent(client: Client) -> None:
        items: list[Any] = list(HELLO)
        root = f"/ng-rollout/{client.address.api_key}/v1"
        while True:
            status, found, _ = await client.post("/responses", {"input": items, "tools": [ADD]}, {}, root)
            assert status == 200
            assert found.keys() >= MANDATORY | {"usage"}
            *others, last = found["output"]
            assert not any("prompt_token_ids" in item for item in others)
            seen.append((last["prompt_token_ids"], last["generation_token_ids"], last["generation_log_probs"]))
            items += found["output"]
            if last["type"] != "function_call":
                break
            items.append({"type": "function_call_output", "call_id": last["call_id"], "output": "7"})
        capture = f"/ng-rollout/{client.address.api_key}/training-token-capture/v1"
        assert (await client.post("/responses", {"input": "other"}, {}, capture))[0] == 200
        assert (await client.post("/responses", {"input": "other"}, {}, "/ng-rollout/0.wrong/v1"))[0] == 401

    seen: list[Any] = []
    other, one = play(agent, AltTokens([f"wait {CALL}", "it is 7", "yes"]), AltChat()).trajectories
    assert one.tokens[one.loss_mask].tolist() == [*alt(f"wait {CALL}"), *alt("it is 7")]
    (first, second), tokens = seen, one.tokens.tolist()
    assert [len(part) for part in second[1:]] == [len(alt("it is 7"))] * 2
    assert tokens == second[0] + second[1], "each prompt begins with all tokens seen"
    assert tokens[: len(first[0] + first[1])] == first[0] + first[1]
    assert np.allclose(first[2] + second[2], one.logprobs[one.loss_mask], atol=1e-6)
    assert other.tokens[other.loss_mask].tolist() == alt("yes")


def test_an_agent_of_nemo_gym_plays_with_the_key_in_its_metadata_and_nowhere_else() -> None:
    async def agent(client: Client) -> None:
        key = client.address.api_key
        for metadata, status in (({"whet_key": key, "own": "1"}, 200), ({"whet_key": "0.x"}, 401), ({}, 401)):
            found, _, _ = await client.post("/responses", {"input": "hi", "metadata": metadata}, {}, "/v1")
            assert found == status
        status, _, _ = await client.post("/chat/completions", {"messages": HELLO, "metadata": {"whet_key": key}}, {})
        assert status == 401, "only the Responses dialect is theirs"
        for body in ([], "x", {"metadata": 3}, {"metadata": {"whet_key": 3}}):
            assert (await client.post("/responses", body, {}))[0] == 401
        wrong = {"Authorization": "Bearer 0.x"}
        assert (await client.post("/responses", {"input": "hi", "metadata": {"whet_key": key}}, wrong))[0] == 401

    (one,) = play(agent, FakeGenerator(["yes"])).trajectories
    assert one.loss_mask.sum() == len("yes") + 1


def test_an_agent_of_nemo_gym_gets_an_incomplete_response_where_the_context_is_full() -> None:
    """Any other agent gets an error. Theirs would fail with it, and nothing would be verified."""

    async def agent(client: Client) -> None:
        body = {"input": "hello" * 20, "metadata": {"whet_key": client.address.api_key}}
        status, found, _ = await client.post("/responses", body, {}, "/v1")
        assert (status, found["status"]) == (200, "incomplete")
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["content"][0]["text"] for item in found["output"]] == [""]
        status, found, _ = await client.post("/responses", {"input": "hello" * 20})
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
        assert (await client.post("/responses", {"input": "hi"}))[0] == 200

    (one,) = play(agent, FakeGenerator(["yes"]), max_context=60).trajectories
    assert one.loss_mask.sum() == len("yes") + 1


def test_a_conversation_is_continued_by_the_id_of_its_last_response() -> None:
    async def agent(client: Client) -> None:
        common = {"instructions": "be brief"}
        _, first, _ = await client.post("/responses", {"input": "a", **common})
        more = {"input": "b", "previous_response_id": first["id"], **common}
        _, second, _ = await client.post("/responses", {**more, "stream": True})
        assert second[-1][1]["response"]["previous_response_id"] == first["id"]
        third = {"input": "c", "previous_response_id": second[-1][1]["response"]["id"], **common}
        _, kept, _ = await client.post("/responses", {**third, "store": False})
        fourth = {"input": "d", "previous_response_id": kept["id"], **common}
        assert (await client.post("/responses", fourth))[1]["error"]["code"] == "previous_response_not_found"

    (one,) = play(agent, FakeGenerator(["one", "two", "three"])).trajectories
    assert one.loss_mask.sum() == len("onetwothree") + 3


@pytest.mark.parametrize("back", ["with its reasoning", "without"])
def test_a_conversation_goes_on_whether_reasoning_comes_back_or_not(back: str) -> None:
    async def agent(client: Client) -> None:
        _, first, _ = await client.post("/responses", {"input": HELLO})
        assert [item["type"] for item in first["output"]] == ["reasoning", "message"]
        kept = first["output"] if back == "with its reasoning" else first["output"][1:]
        await client.post("/responses", {"input": [*HELLO, *kept, {"role": "user", "content": "b"}]})

    (one,) = play(agent, AltTokens(["<think>hm</think>\n\n7", "two"]), ThinkChat()).trajectories
    assert one.tokens[one.loss_mask].tolist() == [*alt("<think>hm</think>\n\n7"), *alt("two")]


def test_reasoning_is_a_field_of_its_own_in_chat_and_hidden_in_messages_unless_it_is_asked_for() -> None:
    async def agent(client: Client) -> None:
        _, chat, _ = await client.post("/chat/completions", {"messages": HELLO})
        message = chat["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "7")
        for back in (message, {"role": "assistant", "content": "<think>hm</think>7"}):
            talk = [*HELLO, back, {"role": "user", "content": "b"}]
            await client.post("/chat/completions", {"messages": talk, "stream": True})
        _, blocks, _ = await client.post("/messages", {"max_tokens": 200, "messages": HELLO})
        assert blocks["content"] == [{"type": "text", "text": "7"}]
        _, stream, _ = await client.post("/messages", {"max_tokens": 200, "messages": HELLO, "stream": True})
        assert "hm" not in json.dumps(stream)

    said = "<think>hm</think>7"
    first, *others = play(agent, AltTokens([said, "one", "two", said, said]), ThinkChat()).trajectories
    assert first.tokens[first.loss_mask].tolist() == [*alt(said), *alt("one")]
    assert others[0].tokens[others[0].loss_mask].tolist() == alt("two"), "a fork of the first"


def test_of_two_responses_with_one_text_the_reasoning_that_comes_back_decides() -> None:
    async def agent(client: Client) -> None:
        first, other = [(await client.post("/responses", {"input": HELLO}))[1]["output"] for _ in range(2)]
        await client.post("/responses", {"input": [*HELLO, *first, {"role": "user", "content": "b"}]})
        assert first[1]["content"] == other[1]["content"]

    said = ["<think>a</think>7", "<think>b</think>7", "end"]
    first, other = play(agent, AltTokens(said), ThinkChat()).trajectories
    assert first.tokens[first.loss_mask].tolist() == [*alt(said[0]), *alt("end")]
    assert other.tokens[other.loss_mask].tolist() == alt(said[1])


def test_messages_are_played_with_the_key_in_their_own_header() -> None:
    async def agent(client: Client) -> None:
        key = {"x-api-key": client.address.api_key}
        body = {"model": "policy", "max_tokens": 200, "messages": HELLO, "tools": [TOOL]}
        status, first, _ = await client.post("/messages", body, key)
        assert (status, first["stop_reason"]) == (200, "tool_use")
        result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "7"}
        talk = [*HELLO, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        _, second, _ = await client.post("/messages", {**body, "messages": talk, "stop_sequences": ["is"]}, key)
        assert (second["stop_reason"], second["stop_sequence"]) == ("stop_sequence", "is")
        assert second["content"] == [{"type": "text", "text": "it "}]
        _, cut, _ = await client.post("/messages", {**body, "max_tokens": 1}, key)
        assert cut["stop_reason"] == "max_tokens"
        status, error, _ = await client.post("/messages", {**body, "temperature": 0.1}, key)
        assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert (await client.post("/messages", body, {"x-api-key": "0.x"}))[1]["error"][
            "type"
        ] == "authentication_error"

    one, _ = play(agent, AltTokens([f"wait {CALL}", "it is 7", "yes"]), AltChat()).trajectories
    assert one.tokens[one.loss_mask].tolist() == [*alt(f"wait {CALL}"), *(300 + b for b in b"it is")]


def test_what_is_left_out_is_named_in_a_header() -> None:
    async def agent(client: Client) -> None:
        for path, body in (("/responses", {"input": "a"}), ("/messages", {"max_tokens": 9, "messages": HELLO})):
            for stream in (False, True):
                asked = {**body, "temperature": 0.1, "top_k": 3, "stream": stream, "model": "gpt-9"}
                status, _, headers = await client.post(path, asked)
                assert (status, headers["x-whet-ignored"]) == (200, "model, temperature, top_k")

    generator = FakeGenerator("yes")
    play(agent, generator, unsupported="ignore")
    assert {request.sampling.temperature for request in generator.requests} == {1.0}


class Paused(FakeGenerator):
    """Samples its second token when it is told to."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.go = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        to, made = listener.get(), await super().generate(request)
        assert to is not None
        to.call(_first(made))
        await self.go.wait()
        return made


def _first(made: Completion) -> Progress:
    return Progress(
        made.id, 0, made.tokens[:1], made.logprobs[:1], np.zeros((1, 0), np.int64), np.zeros((1, 0), np.float32)
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": HELLO}),
        ("/completions", {"prompt": "hello"}),
        ("/responses", {"input": "hello"}),
        ("/messages", {"max_tokens": 9, "messages": HELLO}),
    ],
)
def test_a_token_is_sent_before_the_next_one_is_sampled(path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet_testing.fakes._report", lambda *_: asyncio.sleep(0))
    generator = Paused("yes")

    async def agent(client: Client) -> None:
        headers = {"Authorization": f"Bearer {client.address.api_key}"}
        url, said = client.address.base_url + path, ""
        async with client.session.post(url, json={**body, "stream": True}, headers=headers) as response:
            async for line in response.content:
                said += line.decode()
                if '"y"' in said and not generator.go.is_set():
                    assert '"es"' not in said
                    generator.go.set()
        assert '"es"' in said

    (one,) = play(agent, generator).trajectories
    assert bytes(one.tokens[one.loss_mask][:-1].tolist()) == b"yes"


def test_a_stream_ends_at_a_stop_string_that_spans_new_weights() -> None:
    class Cut(FakeGenerator):
        """New weights arrive behind the first part of the response."""

        calls = 0

        async def generate(self, request: Request) -> Completion:
            if self.calls:
                return await super().generate(request)
            self.calls += 1
            cut = evolve(request, sampling=evolve(request.sampling, max_tokens=len("say ST")))
            return evolve(await super().generate(cut), stop="abort")

    async def agent(client: Client) -> None:
        body = {"messages": HELLO, "stream": True, "stop": ["STOP"], "logprobs": True}
        _, chat, _ = await client.post("/chat/completions", body)
        choices = [choice for _, data in chat if data for choice in data["choices"]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == "say "
        told = [entry for choice in choices for entry in (choice["logprobs"] or {"content": ()})["content"]]
        assert "".join(entry["token"] for entry in told) == "say STOP"

    def said(prompt: str, rng: np.random.Generator) -> str:
        return "OP and more" if "say" in prompt else "say ST"

    play(agent, Cut(said))


def test_a_response_that_fails_on_its_way_ends_its_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet_testing.fakes._report", lambda *_: asyncio.sleep(0))

    class Other(FakeGenerator):
        """Reports a token that it did not sample, as after a loss of its replica."""

        async def generate(self, request: Request) -> Completion:
            to, made = listener.get(), await super().generate(request)
            if to is not None:
                to.call(_first(evolve(made, tokens=made.tokens + 1)))
                await asyncio.sleep(0)
            return made

    async def agent(client: Client) -> None:
        _, chat, _ = await client.post("/chat/completions", {"messages": HELLO, "stream": True})
        assert chat[-1][1]["error"]["code"] == "began_anew"
        _, found, _ = await client.post("/responses", {"input": "a", "stream": True})
        assert (found[-1][0], found[-1][1]["response"]["status"]) == ("response.failed", "failed")
        _, found, _ = await client.post("/messages", {"max_tokens": 9, "messages": HELLO, "stream": True})
        assert found[-1][0] == "error"
        await client.post("/responses", {"input": "b"})

    (one,) = play(agent, Other("yes")).trajectories
    assert one.tokens.tolist() == [*b"user: b\nassistant: yes", *AltChat.stop_tokens], "what no client got is forgotten"


def test_likeliest_tokens_are_shown_with_the_sampled_ones_whole_and_streamed() -> None:
    async def agent(client: Client) -> None:
        asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
        _, whole, _ = await client.post("/chat/completions", asked)
        content = whole["choices"][0]["logprobs"]["content"]
        assert [[top["token"] for top in entry["top_logprobs"]] for entry in content[:2]] == [["n", "o"], ["o", "p"]]
        assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
        _, chunks, _ = await client.post("/chat/completions", {**asked, "stream": True})
        logprobs = [chunk["choices"][0]["logprobs"] for _, chunk in chunks if chunk]
        streamed = [entry for found in logprobs if found for entry in found["content"]]
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
        _, text, _ = await client.post("/completions", {"prompt": "a", "logprobs": 1})
        assert list(text["choices"][0]["logprobs"]["top_logprobs"][0]) == ["n"]
        _, items, _ = await client.post("/responses", {"input": "a", "top_logprobs": 1})
        assert items["output"][0]["content"][0]["logprobs"][1]["top_logprobs"][0]["token"] == "o"

    for trajectory in play(agent, FakeGenerator("no")).trajectories:
        assert not trajectory.columns, "what is shown is not recorded"


# Clients of others


def test_openais_client_reads_responses_whole_and_streamed() -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

    async def agent(client: Client) -> None:
        async with openai.AsyncOpenAI(base_url=client.address.base_url, api_key=client.address.api_key) as asking:
            whole = await asking.responses.create(model="policy", input="a", tools=[ADD])
            assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
            assert (whole.output_text, whole.status, whole.output[2].arguments) == ("wait", "completed", '{"a": 3}')
            openai.types.responses.Response.model_validate(whole.model_dump())
            async with asking.responses.stream(model="policy", input="a", tools=[ADD]) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
            assert (final.output_text, final.output[2].arguments) == ("wait", '{"a": 3}')
            assert kinds.count("response.output_text.delta") > 1
            assert kinds[-1] == "response.completed"

    play(agent, FakeGenerator(f"<think>hm</think>\n\nwait {CALL}"), ThinkChat())


def test_anthropics_client_reads_messages_whole_and_streamed() -> None:
    anthropic = pytest.importorskip(
        "anthropic", reason="Anthropic's client is not installed: nox -s adapters installs it"
    )

    async def agent(client: Client) -> None:
        root = client.address.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=client.address.api_key) as asking:
            common: Any = {"model": "policy", "max_tokens": 200, "messages": HELLO, "tools": [TOOL]}
            common["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            whole = await asking.messages.create(**common)
            assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
            async with asking.messages.stream(**common) as stream:
                texts = [text async for text in stream.text_stream]
                final = await stream.get_final_message()
            assert [(b.type, getattr(b, "input", None)) for b in final.content][2] == ("tool_use", {"a": 3})
            assert ("".join(texts), final.stop_reason) == ("wait", "tool_use")
            assert final.usage.input_tokens == whole.usage.input_tokens > 0
            assert len(texts) > 1
            with pytest.raises(anthropic.BadRequestError, match="top_k"):
                await asking.messages.create(**common, extra_body={"top_k": 1})

    play(agent, FakeGenerator(f"<think>hm</think>\n\nwait {CALL}"), ThinkChat())
