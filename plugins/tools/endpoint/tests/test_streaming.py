"""The text of a running response: what is sent early never has to be taken back, and adds up to the whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.data.messages import Message
from whet.data.records import Completion, Sampling
from whet_chat.tokenizer import ChatTokenizer
from whet_endpoint.chat import read_chat
from whet_endpoint.choices import Likeliest, Tokens
from whet_endpoint.reading import read_choice, shape_of, without_tags
from whet_endpoint.requests import ApiRequest, Rules
from whet_endpoint.streaming import RunningText
from whet_testing.fakes import ByteChat

RULES = Rules(Sampling(max_tokens=500, stop_tokens=ByteChat.stop_tokens), fixed=True)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


class ThinkChat(ByteChat):
    """A template that drops the reasoning of earlier turns, as that of Qwen 3."""

    def render(self, conversation: Any, *, generation_prompt: bool = False) -> str:
        kept = [evolve(m, content=m.text.rpartition("</think>")[2].lstrip()) for m in conversation]
        return super().render(tuple(kept), generation_prompt=generation_prompt)


class OpenedChat(ThinkChat):
    """A template whose prompt opens the reasoning, as that of DeepSeek R1."""

    def render(self, conversation: Any, *, generation_prompt: bool = False) -> str:
        return super().render(conversation, generation_prompt=generation_prompt) + "<think>\n" * generation_prompt


CHATS = {"plain": ByteChat(), "thinking": ThinkChat(), "opened": OpenedChat()}


def asked(**fields: Any) -> ApiRequest:
    return read_chat({"messages": [{"role": "user", "content": "hello"}], **fields}, RULES)


def streamed(
    request: ApiRequest, text: str, at_a_time: int, chat: ByteChat = CHATS["plain"]
) -> tuple[list[tuple[bool, str]], Any]:
    """Return the pieces of a text that arrives some bytes at a time, and the whole choice."""
    tokens = np.append(chat.encode(text), chat.stop_tokens)
    running, pieces = RunningText(request, chat), list[Any]()
    for begin in range(0, len(tokens), at_a_time):
        pieces += running.add(tokens[begin : begin + at_a_time])
    completion = Completion("x", tokens, np.zeros(len(tokens), np.float32), "stop", ((0, 0),))
    choice = read_choice(request, chat, np.arange(3), completion)
    pieces += running.end(choice)
    return [(piece.reasons, piece.text) for piece in pieces], choice


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("chat", CHATS)
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
        "< not a tag, <think neither",
        "an end </think> of what was not begun",
        "</think>begun and ended by the template",
        "",
    ],
)
def test_pieces_add_up_to_the_whole_however_they_arrive(text: str, fields: Any, chat: str, at_a_time: int) -> None:
    pieces, choice = streamed(asked(**fields), text, at_a_time, CHATS[chat])
    assert "".join(text for reasons, text in pieces if not reasons) == choice.text
    assert "".join(text for reasons, text in pieces if reasons) == choice.reasoning
    assert all(text for _, text in pieces)
    kinds = [reasons for reasons, _ in pieces]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"


def test_a_tag_of_reasoning_that_the_prompt_has_opened_may_come_again_in_pieces() -> None:
    tags = shape_of(CHATS["opened"]).format.reasoning
    assert tags is not None
    assert (tags.open, tags.opened) == ("<think>", True)
    pieces, choice = streamed(asked(), "<think>hm</think>\n\n7", 1, CHATS["opened"])
    assert pieces == [(True, "h"), (True, "m"), (False, "7")]
    assert choice.reasoning == "hm"


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


def test_reasoning_is_what_the_template_drops_and_comes_apart() -> None:
    tags = shape_of(CHATS["thinking"]).format.reasoning
    assert tags is not None
    assert (tags.open, tags.close, tags.opened) == ("<think>", "</think>", False)
    assert shape_of(CHATS["plain"]).format.reasoning is None
    pieces, choice = streamed(asked(), "<think>\nhm\n</think>\n\n7", 1, CHATS["thinking"])
    assert (choice.reasoning, choice.text) == ("hm", "7")
    assert pieces == [(True, "h"), (True, "m"), (False, "7")]


@pytest.mark.parametrize("text", ["<think>\nhm\n</think>\n\n7", "hm</think>7", "<think>hm"])
def test_reasoning_that_comes_back_within_the_text_is_found(text: str) -> None:
    found = without_tags(Message("assistant", text))
    assert (found.reasoning, found.text) == ("hm", "" if text == "<think>hm" else "7")
    assert without_tags(Message("assistant", "7")) == Message("assistant", "7")


def test_special_tokens_are_shown_as_little_as_to_graders(tiny_model_folder: Path) -> None:
    chat = ChatTokenizer(tiny_model_folder)
    tokens = chat.encode("ab<|endoftext|>c<|im_start|>d<|im_end|>")
    running = RunningText(asked(), chat)
    pieces = [piece.text for token in tokens for piece in running.add(token[None])]
    completion = Completion("x", tokens, np.zeros(len(tokens), np.float32), "stop", ((0, 0),))
    choice = read_choice(asked(), chat, np.arange(3), completion)
    assert choice.text == "".join(pieces) == chat.message(tokens).text == "abcd"


def test_bytes_of_tokens_add_up_to_the_text_also_within_a_character(tiny_model_folder: Path) -> None:
    chat, text = ChatTokenizer(tiny_model_folder), "é🎉 ab"
    tokens = chat.encode(text)
    logprobs = np.zeros(len(tokens), np.float32)
    shown = list(Tokens(tokens, logprobs, Likeliest(tokens[:, None], logprobs[:, None])).entries(chat))
    assert b"".join(bytes(entry["bytes"]) for entry in shown) == text.encode()
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in shown)
