"""Agents that call tools, with OpenAI's own client: what they see, and the tokens that are recorded."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

from whet.data.messages import Call, Message  # noqa: E402
from whet.data.records import Episode, Sampling, Task  # noqa: E402
from whet.interfaces.environment import Model  # noqa: E402
from whet.rollout.recorded import Assignment  # noqa: E402
from whet.rollout.routing import Route  # noqa: E402
from whet_chat.tokenizer import ChatTokenizer  # noqa: E402
from whet_testing.fakes import FakeGenerator, FakeModel  # noqa: E402
from whet_testing.playing import AltChat, AltTokens, alt, make_player  # noqa: E402

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}},
}
HELLO: Any = {"role": "user", "content": "3+4?"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
Agent = Callable[[Any], Awaitable[Any]]


def play(agent: Agent, generator: Any, chat: Any = None, ignore: tuple[str, ...] = ()) -> Episode:
    """Play an episode with an agent that has OpenAI's client alone."""

    class Foreign:
        reward_weights: Mapping[str, float] = {}

        def tasks(self, split: str) -> list[Task]:
            return [Task("hello")]

        async def run(self, task: Task, model: Model) -> Mapping[str, float]:
            async with model.endpoint(ignore=ignore) as address:
                await asking(address, agent)
            return {"done": 1.0}

        def close(self) -> None:
            pass

    player = make_player(generator, chat, sampling=Sampling(max_tokens=200))
    return asyncio.run(player.episode(Assignment(Route("foreign", Foreign(), "train"), Task("hello"), 3, 7), 0))


async def asking(address: Any, agent: Agent) -> None:
    async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
        await agent(lambda messages, **options: client.chat.completions.create(
            model="policy", messages=messages, **{"tools": [ADD], **options}
        ))  # fmt: skip


def test_a_model_that_calls_and_is_answered_is_one_sequence_with_the_tokens_that_the_engine_saw(
    tiny_model_folder: Path,
) -> None:
    chat = ChatTokenizer(tiny_model_folder, TEMPLATE)
    generator = FakeGenerator([f"I add. {CALL}{CALL}", "It is 7."], chat)

    async def agent(ask: Any) -> None:
        (choice,) = (await ask([HELLO])).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I add."
        assert [(call.type, call.function.name) for call in choice.message.tool_calls] == [("function", "add")] * 2
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"a": 3, "b": 4}] * 2
        assert len({call.id for call in choice.message.tool_calls}) == 2
        results = [{"role": "tool", "tool_call_id": c.id, "content": "7"} for c in choice.message.tool_calls]
        (choice,) = (await ask([HELLO, choice.message, *results])).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It is 7.", None, "stop")

    (one,) = (episode := play(agent, generator, chat)).trajectories
    calls = (Call("", "add", '{"a": 3, "b": 4}'),) * 2
    said = (Message("user", "3+4?"), Message("assistant", "I add. ", calls), *[Message("tool", "7")] * 2)
    whole = chat.template.render(said, generation_prompt=True, tools=(json.dumps(ADD),)) + "It is 7.<|im_end|>"
    assert chat.decode(one.tokens, skip_special=False) == whole
    first, second = generator.requests
    assert second.tokens.tolist() == one.tokens[: len(second.tokens)].tolist()
    assert first.tokens.tolist() == one.tokens[: one.prompt_length].tolist()
    trained = chat.decode(one.tokens[one.loss_mask], skip_special=False)
    assert trained == f"I add. {CALL}{CALL}<|im_end|>It is 7.<|im_end|>"
    assert episode.messages[1] == ("assistant", f"I add. {CALL}{CALL}"), "what is graded is what the model wrote"


def test_calls_are_continued_with_the_tokens_that_were_sampled_however_the_agent_writes_them() -> None:
    spaced = '<tool_call>  {"arguments": {"b":4,  "a":3}, "name": "add"}'

    async def agent(ask: Any) -> None:
        (choice,) = (await ask([HELLO])).choices
        call = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"a":3,"b":4}'}}
        for content in (None, ""):
            said = {"role": "assistant", "content": content, "tool_calls": [call]}
            await ask([HELLO, said, {"role": "tool", "content": "7", "tool_call_id": "mine"}])
        assert choice.message.content is None
        call["function"]["arguments"] = '{"a":3,"b":5}'
        await ask([HELLO, said, {"role": "tool", "content": "8", "tool_call_id": "mine"}])

    one, fork, other = play(agent, AltTokens([spaced, "7", "seven", "8"]), AltChat()).trajectories
    begin = f"tool: {json.dumps(ADD)}\nuser: 3+4?\nassistant: ".encode()
    for sequence in (one, fork):
        assert sequence.tokens[: len(begin) + len(alt(spaced))].tolist() == [*begin, *alt(spaced)]
    assert one.tokens[one.loss_mask].tolist() == [*alt(spaced), *alt("7")]
    assert fork.tokens[fork.loss_mask].tolist() == alt("seven")
    assert b'"b": 5}}</tool_call>' in bytes(int(t) for t in other.tokens if t < 256), "that was never said"


def test_other_tools_are_another_conversation_and_calls_of_none_are_text() -> None:
    async def agent(ask: Any) -> None:
        for options in ({}, {"tools": [{**ADD, "function": {"name": "sub"}}]}, {"tools": []}):
            (choice,) = (await ask([HELLO], **options)).choices
            await ask([HELLO, choice.message, HELLO], **options)

    episode = play(agent, FakeGenerator(["one", "two"] * 3))
    assert [t.loss_mask.sum() for t in episode.trajectories] == [8, 8, 8]

    async def freely(ask: Any) -> None:
        for options in ({"tool_choice": "none"}, {"tools": []}):
            (choice,) = (await ask([HELLO], **options)).choices
            assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
            assert choice.finish_reason == "stop"

    generator = FakeGenerator(CALL)
    play(freely, generator)
    assert [b"tool: " in bytes(request.tokens.astype(np.uint8)) for request in generator.requests] == [True, False]


def test_a_damaged_call_and_one_that_was_cut_are_text() -> None:
    async def agent(ask: Any) -> None:
        (choice,) = (await ask([HELLO])).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL[:20], None, "stop")
        (choice,) = (await ask([HELLO], max_tokens=30)).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL[:30], None, "length")
        (choice,) = (await ask([HELLO], stop=["</tool_call>"])).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["add"]

    play(agent, FakeGenerator([CALL[:20], CALL, CALL]))


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice", "it cannot be made to call; wanted auto or none"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice", "wanted auto or none"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "it may call several tools"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs", "the logprobs of sampled tokens alone"),
        ({"tools": [{**ADD, "function": {"name": "add", "strict": True}}]}, "tools", "ignore=['strict']"),
    ],
)
def test_what_cannot_be_kept_is_refused_unless_it_is_to_be_ignored(options: Any, param: str, said: str) -> None:
    async def refused(ask: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask([HELLO], **options)
        assert caught.value.param == param
        assert said in caught.value.message
        assert "model.endpoint(ignore=" in caught.value.message
        await ask([HELLO])

    async def ignored(ask: Any) -> None:
        assert (await ask([HELLO], **options)).choices[0].message.content == "yes"

    play(refused, FakeGenerator("yes"))
    play(ignored, FakeGenerator("yes"), ignore=("strict" if param == "tools" else param,))


def test_a_model_that_knows_no_tools_refuses_them_and_the_episode_goes_on(tiny_model_folder: Path) -> None:
    chat = ChatTokenizer(tiny_model_folder)
    called = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]

    async def agent(ask: Any) -> None:
        for messages, options, param in (
            ([HELLO], {}, "tools"),
            ([HELLO, {"role": "assistant", "tool_calls": called}, HELLO], {"tools": []}, "messages"),
        ):
            with pytest.raises(openai.BadRequestError, match=r"knows no tools.*model\.chat_template") as caught:
                await ask(messages, **options)
            assert caught.value.param == param
        await ask([HELLO], tools=[])

    assert play(agent, FakeGenerator("yes", chat), chat).turns == 1


def test_where_a_template_rewrites_history_the_conversation_goes_on_in_another_sequence(
    tiny_model_folder: Path,
) -> None:
    forgetful = TEMPLATE.replace("{{ m.content or '' }}", "{{ '' if m.role == 'assistant' else m.content }}")
    chat = ChatTokenizer(tiny_model_folder, forgetful)
    generator = FakeGenerator([f"I add. {CALL}", "It is 7."], chat)

    async def agent(ask: Any) -> None:
        (choice,) = (await ask([HELLO])).choices
        (call,) = choice.message.tool_calls
        await ask([HELLO, choice.message, {"role": "tool", "content": "7", "tool_call_id": call.id}])

    first, second = play(agent, generator, chat).trajectories
    assert chat.decode(first.tokens[first.loss_mask], skip_special=False) == f"I add. {CALL}<|im_end|>"
    assert chat.decode(second.tokens[second.loss_mask], skip_special=False) == "It is 7.<|im_end|>"
    assert (first.part, second.part) == (0, 1)
    assert "I add" not in chat.decode(second.tokens)


def test_a_stream_of_calls_adds_up_for_openais_client() -> None:
    async def run() -> None:
        model = FakeModel([f"I add. {CALL}{CALL}"] * 2 + ["It is 7."])
        async with model.endpoint() as address, openai.AsyncOpenAI(
            base_url=address.base_url, api_key=address.api_key
        ) as client:  # fmt: skip
            parts = await client.chat.completions.create(model="policy", messages=[HELLO], tools=[ADD], stream=True)
            chunks = [chunk async for chunk in parts]
            deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert [call.index for call in deltas] == [0, 1]
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            async with client.chat.completions.stream(model="policy", messages=[HELLO], tools=[ADD]) as stream:
                whole = await stream.get_final_completion()
            message = whole.choices[0].message
            assert message.content == "I add."
            assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 3, "b": 4}] * 2
            assert [call.id for call in message.tool_calls] == [call.id for call in deltas]
            said = {"role": "assistant", "content": message.content, "tool_calls": [
                {"id": c.id, "type": "function", "function": {"name": "add", "arguments": c.function.arguments}}
                for c in message.tool_calls
            ]}  # fmt: skip
            results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
            answer = await client.chat.completions.create(
                model="policy", messages=[HELLO, said, *results], tools=[ADD], stream=True
            )
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in answer]) == "It is 7."

    asyncio.run(run())
