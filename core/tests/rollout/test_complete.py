"""Answers that new weights cut short come whole, and each token keeps what it was sampled with."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from whet.data.records import Completion, Request, Sampling
from whet.rollout.complete import complete, merged_columns
from whet_testing.fakes import ByteCodec, FakeGenerator

CODEC = ByteCodec()


class Cutting(FakeGenerator):
    """Says `text` one letter after the other from where the prompt ends, and is cut short after so many letters."""

    def __init__(self, text: str, cuts: Sequence[int]) -> None:
        super().__init__(text)
        self._text, self._cuts = text, list(cuts)

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        said = len(request.tokens) - 2
        rest = CODEC.encode(self._text[said:])
        most = request.sampling.max_tokens
        stop = "length" if len(rest) >= most else "stop"
        tokens = rest[:most]
        for end in range(1, len(tokens) + 1):
            if any(s in CODEC.decode(tokens[:end]) for s in request.sampling.stop):
                tokens, stop = tokens[:end], "stop"
                break
        if self._cuts:
            cut = self._cuts.pop(0)
            if cut < len(tokens):
                tokens, stop = tokens[:cut], "abort"
        version, self.version = self.version, self.version + 1
        logprobs = -np.arange(said, said + len(tokens), dtype=np.float32) - 1
        versions = ((0, version),) if len(tokens) else ()
        routed = np.concatenate([request.tokens, tokens]) * 2
        routed[-1:] = -1  # as the last token was no input
        return Completion(request.id, tokens, logprobs, stop, versions, {"routed": routed})  # type: ignore[arg-type]


def ask(generator: FakeGenerator, **sampling: object) -> Completion:
    settings = Sampling(**{"max_tokens": 20, **sampling})  # type: ignore[arg-type]
    request = Request("r", CODEC.encode("p:"), settings, 7, "shared")
    return asyncio.run(asyncio.wait_for(complete(generator, request, CODEC.decode), 5))


def text(completion: Completion) -> str:
    return CODEC.decode(completion.tokens)


def test_an_answer_that_is_not_cut_short_is_passed_on() -> None:
    generator = Cutting("hello", [])
    made = ask(generator)
    assert (text(made), made.stop, made.versions) == ("hello", "stop", ((0, 0),))
    assert [r.id for r in generator.requests] == ["r"]


def test_the_parts_are_joined_with_logprobs_versions_and_columns() -> None:
    generator = Cutting("hello world", [3, 0, 4])
    made = ask(generator)
    assert (made.id, text(made), made.stop) == ("r", "hello world", "stop")
    assert made.versions == ((0, 0), (3, 2), (7, 3))
    assert made.logprobs.tolist() == [-i - 1.0 for i in range(11)]
    assert made.columns["routed"].tolist() == [*(np.concatenate([CODEC.encode("p:"), made.tokens[:-1]]) * 2), -1]
    assert [CODEC.decode(r.tokens) for r in generator.requests] == ["p:", "p:hel", "p:hel", "p:hello w"]
    assert [r.sampling.max_tokens for r in generator.requests] == [20, 17, 17, 13]
    assert [r.prefix for r in generator.requests] == ["shared", "", "", ""]


def test_each_part_draws_anew_and_the_same_when_asked_again() -> None:
    once, again = Cutting("hello world", [3, 4]), Cutting("hello world", [3, 4])
    ask(once)
    ask(again)
    seeds = [r.seed for r in once.requests]
    assert len(set(seeds)) == 3
    assert seeds == [r.seed for r in again.requests]


def test_parts_of_one_version_are_one_span() -> None:
    class Still(Cutting):
        async def generate(self, request: Request) -> Completion:
            self.version = 4
            return await super().generate(request)

    assert ask(Still("hello world", [3, 4])).versions == ((0, 4),)


def test_the_limit_holds_over_all_parts() -> None:
    made = ask(Cutting("hello world", [3, 4]), max_tokens=9)
    assert (text(made), made.stop) == ("hello wor", "length")


@pytest.mark.parametrize("cuts", [[4], [5], [3, 2], [2, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
def test_a_stop_string_across_parts_ends_the_answer(cuts: list[int]) -> None:
    made = ask(Cutting("one. STOP two", [2, *cuts]), stop=("STOP", "never said"))
    assert (text(made), made.stop) == ("one. STOP", "stop")
    assert len(made.logprobs) == len(made.tokens) == len(made.columns["routed"]) - 2
    assert made.versions[-1][0] < len(made.tokens)


@pytest.mark.parametrize(
    ("sampling", "cuts", "expected"),
    [
        ({"max_tokens": 5}, [], ("hello", "length")),
        ({"stop_tokens": (3, int(CODEC.encode("d")[0]))}, [], ("hello world", "stop")),
        ({"stop_tokens": (int(CODEC.encode("d")[0]),)}, [4], ("hello world", "stop")),
        ({"stop_tokens": (int(CODEC.encode("d")[0]),), "max_tokens": 11}, [4], ("hello world", "stop")),
        ({"stop": ("lo", "never said")}, [], ("hello", "stop")),
        ({"stop": ("wor",)}, [2], ("hello wor", "stop")),
        ({"stop": ("lo w",)}, [4], ("hello w", "stop")),
    ],
)
def test_a_generator_that_cuts_short_at_the_end_is_not_asked_for_more(
    sampling: dict[str, Any], cuts: list[int], expected: tuple[str, str]
) -> None:
    class Late(Cutting):
        async def generate(self, request: Request) -> Completion:
            made = await super().generate(request)
            return Completion(made.id, made.tokens, made.logprobs, "abort", made.versions)

    generator = Late("hello world", cuts)
    made = ask(generator, **sampling)
    assert (text(made), made.stop) == expected
    assert len(made.logprobs) == len(made.tokens)
    assert len(generator.requests) == len(cuts) + 1


def test_the_first_record_of_a_token_counts_over_several_turns() -> None:
    """The last token of a turn is recorded by the next turn, because it is an input of that turn."""

    def turn(prompt: int, tokens: int, number: int) -> tuple[int, Completion]:
        column = np.full((prompt + tokens, 1), number, np.int16)
        column[-1] = -1
        made = np.zeros(tokens, np.int64), np.zeros(tokens, np.float32)
        return prompt, Completion("r", *made, "stop", ((0, 0),), {"routed": column})

    merged = merged_columns([turn(2, 3, 1), turn(7, 2, 2)], 10)
    assert merged["routed"][:, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, -1, -1]
