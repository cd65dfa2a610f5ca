"""What requests may say. Every row of these tables is a request that clients make."""

from typing import Any

import numpy as np
import pytest

from whet.data.messages import Message
from whet.data.records import Sampling
from whet.errors import WhetError
from whet_endpoint.chat import read_chat, read_text
from whet_endpoint.errors import ApiError
from whet_endpoint.requests import MODEL, Rules, check_ignored, shown

BASE = Sampling(max_tokens=100, temperature=0.7, stop=("END",), stop_tokens=(2,))
EPISODE, RUN = Rules(BASE, fixed=True), Rules(BASE, fixed=False)
HELLO = [{"role": "user", "content": "hello"}]


def chat(rules: Rules = EPISODE, **fields: Any) -> Any:
    return read_chat({"model": MODEL, "messages": HELLO, **fields}, rules)


def test_a_request_that_says_nothing_is_sampled_as_the_run_is() -> None:
    asked = chat()
    assert asked.sampling == BASE
    assert (asked.count, asked.seed) == (1, None)
    assert [asked.stream, asked.show_usage, asked.show_logprobs, asked.show_tokens] == [False] * 4
    assert asked.prompt == (Message("user", "hello"),)


def test_null_is_as_if_it_were_not_there() -> None:
    assert chat(temperature=None, stop=None, n=None, tools=None, seed=None, max_tokens=None).sampling == BASE


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"top_p": 1},
        {"top_p": 1.0, "top_k": -1},
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
        {"user": "someone", "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
        {"top_logprobs": 0},
        {"stream_options": {"include_usage": None}},
    ],
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields).sampling == BASE


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 10**9}, 100),
    ],
)
def test_the_longest_answer_is_bounded(fields: dict[str, Any], limit: int) -> None:
    assert chat(**fields).sampling.max_tokens == limit


def test_stop_strings_come_beside_those_of_the_run() -> None:
    asked = chat(stop=["a", "b"])
    assert (asked.sampling.stop, asked.stops) == (("END", "a", "b"), ("a", "b"))
    assert chat(stop="a").stops == ("a",)


def test_whoever_talks_to_a_run_may_sample_otherwise() -> None:
    asked = chat(RUN, temperature=0, top_p=0.9, top_k=40, seed=7)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k, asked.seed) == (0, 0.9, 40, 7)
    with pytest.raises(ApiError) as caught:
        chat(RUN, tools=[{}])
    assert "ignore" not in str(caught.value), "there is no environment that could ignore it"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1e-40}, "temperature"),
        ({"top_k": 10**19}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"seed": "x"}, "seed"),
        ({"tools": [{}]}, "tools"),
        ({"whatever": 1}, "whatever"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{}]}, *HELLO]}, "messages"),
    ],
)
def test_what_cannot_be_is_refused_with_the_name_of_the_parameter(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(RUN, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_another_model_is_not_found_unless_the_name_is_to_be_ignored() -> None:
    with pytest.raises(ApiError, match=r"'gpt-5'.*'policy'") as caught:
        chat(model="gpt-5")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert chat(Rules(BASE, True, frozenset({"model"})), model="gpt-5").sampling == BASE


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(ApiError, match="no JSON object"):
        read_chat(body, EPISODE)


def test_messages_are_read_as_clients_send_them_back() -> None:
    echoed = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    asked = chat(messages=[{"role": "developer", "content": "be brief"}, *HELLO, echoed, parts])
    assert [(m.role, m.text) for m in asked.prompt] == [
        ("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "ab"),
    ]  # fmt: skip


def test_plain_completions_take_text_or_tokens() -> None:
    assert read_text({"prompt": "once"}, EPISODE).prompt == "once"
    assert read_text({"prompt": ["once"]}, EPISODE).prompt == "once"
    assert np.array_equal(read_text({"prompt": [1, 2]}, EPISODE).prompt, [1, 2])
    assert np.array_equal(read_text({"prompt": [[1, 2]], "logprobs": 0}, EPISODE).prompt, [1, 2])
    for prompt in ("", [], ["a", "b"], [1, "a"], [-1], [True], [2**40], None, {"a": 1}):
        with pytest.raises(ApiError) as caught:
            read_text({"prompt": prompt}, EPISODE)
        assert caught.value.param == "prompt"


def test_more_likeliest_tokens_than_the_api_has_are_refused() -> None:
    able = Rules(BASE, fixed=True, extras=frozenset({"likeliest"}))
    assert read_text({"prompt": "a", "logprobs": 20}, able).likeliest == 20
    with pytest.raises(ApiError) as caught:
        read_text({"prompt": "a", "logprobs": 21}, able)
    assert (caught.value.status, caught.value.param) == (400, "logprobs")
    with pytest.raises(ApiError, match="set logprobs: true") as caught:
        chat(able, top_logprobs=2)
    assert (caught.value.status, caught.value.param) == (400, "top_logprobs")


def test_what_no_request_can_do_without_cannot_be_ignored() -> None:
    assert check_ignored(["seed", "seed"]) == {"seed"}
    for names in (["messages"], ["prompt"], "seed"):
        with pytest.raises(WhetError, match="ignore="):
            check_ignored(names)


def test_an_answer_is_shown_up_to_the_first_stop_string() -> None:
    assert shown("one two three", ("three", "two")) == "one "
    assert shown("one", ("two",)) == "one"
    assert shown("one", ()) == "one"
