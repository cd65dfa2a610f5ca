"""A completion is as long as all allow, and requests that no engine can serve are refused."""

from typing import Any

import numpy as np
import pytest

from whet.data.records import Request, Sampling
from whet.errors import WhetError
from whet_generation.limits import completion_limit, context_length


def request(length: int = 3, token: int = 5, **sampling: Any) -> Request:
    return Request("r1", np.full(length, token, np.int64), Sampling(**sampling), 0)


@pytest.mark.parametrize(
    ("limits", "expected"), [((0, 0, 256), 256), ((0, 100, 256), 100), ((64, 100, 0), 64), ((0, 0, 0), 0)]
)
def test_a_sequence_is_as_long_as_all_allow(limits: tuple[int, int, int], expected: int) -> None:
    assert context_length(*limits) == expected


def test_a_completion_ends_at_the_longest_sequence() -> None:
    assert completion_limit(request(max_tokens=10), 256, 384, "Steam") == 10
    assert completion_limit(request(length=250, max_tokens=10), 256, 384, "Steam") == 6
    assert completion_limit(request(temperature=0.0), 256, 384, "Steam", 0.01) > 0


def test_stop_strings_are_refused_where_no_tokenizer_finds_them() -> None:
    assert completion_limit(request(max_tokens=9), 256, 384, "Steam", strings=False) == 9
    with pytest.raises(WhetError, match="request r1 has stop strings, which Steam cannot find without a tokenizer"):
        completion_limit(request(stop=("a",)), 256, 384, "Steam", strings=False)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(length=0), "request r1 has an empty prompt"),
        (request(token=384), "a token outside the vocabulary of 384"),
        (request(token=-1), "a token outside the vocabulary"),
        (
            request(length=256),
            "a prompt of 256 tokens, which leaves no room in the engine's 256; raise generator.max_context",
        ),
        (request(temperature=0.004), r"temperature 0\.004; Steam's lowest but 0 is 0\.01"),
    ],
)
def test_a_request_that_cannot_be_served_as_asked_is_refused(asked: Request, message: str) -> None:
    with pytest.raises(WhetError, match=message):
        completion_limit(asked, 256, 384, "Steam", 0.01)
