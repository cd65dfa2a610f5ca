"""The text of a running response: what is sent early never has to be taken back, and adds up to the whole."""

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.data.records import Completion, Sampling
from whet_endpoint.chat import read_chat
from whet_endpoint.reasoning import parts, split, split_running, whole
from whet_endpoint.requests import ApiRequest, Rules
from whet_endpoint.streaming import RunningText
from whet_endpoint.tool_calls import read_choice
from whet_testing.fakes import ByteChat

RULES = Rules(Sampling(max_tokens=500, stop_tokens=ByteChat.stop_tokens), fixed=True)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


def asked(*, reasoning: bool = False, **fields: Any) -> ApiRequest:
    request = read_chat({"messages": [{"role": "user", "content": "hello"}], **fields}, RULES)
    return evolve(request, splits_reasoning=reasoning)


def streamed(request: ApiRequest, text: str, at_a_time: int) -> tuple[list[tuple[bool, str]], Any]:
    """Return the pieces of a text that arrives some bytes at a time, and the whole choice."""
    chat, tokens = ByteChat(), np.append(ByteChat().encode(text), ByteChat.stop_tokens)
    running, pieces = RunningText(request, chat), list[Any]()
    for begin in range(0, len(tokens), at_a_time):
        pieces += running.add(tokens[begin : begin + at_a_time])
    completion = Completion("x", tokens, np.zeros(len(tokens), np.float32), "stop", ((0, 0),))
    choice = read_choice(request, chat, np.arange(3), completion)
    pieces += running.end(choice)
    return [(piece.reasons, piece.text) for piece in pieces], choice


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"stop": ["END", "\n\n"]}])
@pytest.mark.parametrize(
    "text",
    [
        "plain words, and more",
        "ä€😀 in several bytes",
        "<think>hm, 3+4</think>\n\nit is 7",
        "<think>cut before it ends",
        f"<think>I call</think>\n\nwait {CALL}",
        f"before it {CALL}\n{CALL}",
        "no call: <tool_ and <tool_call>{damaged</tool_call>",
        "the EN and then END of it\n\nall",
        "  spaces around  ",
        "< not a tag, </think> neither",
        "",
    ],
)
def test_pieces_add_up_to_the_whole_however_they_arrive(
    text: str, fields: Any, reasoning: bool, at_a_time: int
) -> None:
    pieces, choice = streamed(asked(reasoning=reasoning, **fields), text, at_a_time)
    assert "".join(text for reasons, text in pieces if not reasons) == choice.text
    assert "".join(text for reasons, text in pieces if reasons) == choice.reasoning
    assert all(text for _, text in pieces)
    kinds = [reasons for reasons, _ in pieces]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"


def test_text_comes_with_its_token() -> None:
    pieces, _ = streamed(asked(), "yes", 1)
    assert pieces == [(False, "y"), (False, "e"), (False, "s")]


def test_what_may_become_a_call_or_a_stop_string_waits() -> None:
    running = RunningText(asked(tools=[TOOL], stop=["END"]), ByteChat())
    said = [[piece.text for piece in running.add(ByteChat().encode(part))] for part in ("a <tool", "_box> b E", "N c")]
    assert said == [["a"], [" <tool_box> b"], [" EN c"]]


def test_a_call_is_not_shown_as_text() -> None:
    pieces, choice = streamed(asked(tools=[TOOL]), f"wait {CALL}", 1)
    assert "".join(text for _, text in pieces) == "wait" == choice.text
    assert [(call.name, call.arguments) for call in choice.calls] == [("add", '{"a": 3}')]


def test_reasoning_is_parted_from_the_text() -> None:
    assert split("<think>\nhm\n</think>\n\n7") == ("hm", "7")
    assert split("hm\n</think>\n7", inside=True) == ("hm", "7")
    assert split("7 </think> 8") == ("", "7 </think> 8")
    assert split("<think>hm") == ("hm", "")
    assert parts(whole("hm", "7")) == ("hm", "7")
    assert whole("", "7") == "7"


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("text", ["<think>hm 3</think>\n\n7 </think> 8", "hm </th </think>\n 7", "<thi", "x<think>"])
def test_running_reasoning_is_a_beginning_of_the_whole(text: str, inside: bool) -> None:
    final = split(text, inside)
    for end in range(len(text) + 1):
        for begun, all_of_it in zip(split_running(text[:end], inside), final, strict=True):
            assert all_of_it.startswith(begun), (text[:end], begun, all_of_it)
