"""A generator that serves one request after another keeps the contract of generators, with any engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.component import import_file, import_path
from whet.config.structure import unstructure
from whet.data.records import Request, Sampling
from whet.errors import PluginError, WeightSyncError, WhetError, WorkerError
from whet.interfaces.workers import RoleContext, WorkerRank
from whet_testing.contracts.generator import GeneratorContract
from whet_testing.served import Subject

PARTS: Any = import_file(str(Path(__file__).with_name("letters.py")))


def worker(stream: list[Any]) -> Any:
    class Worker(PARTS.LettersWorker):  # type: ignore[misc]
        def continued(self, request: Request) -> Iterator[Any]:
            yield from stream

    config = {"config": unstructure(PARTS.Letters()), "config_type": import_path(PARTS.Letters)}
    return Worker(WorkerRank("generator", 0, 1), model=None, **config)


async def served(worker: Any, tokens: int = 9) -> Any:
    request = Request("it", np.arange(3), Sampling(max_tokens=tokens), seed=0)
    return [outcome async for (outcome,) in worker.generate([request])][-1]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        ([(97, -1.0)] * 3, "`continued` of Worker ended after 3 tokens; it must yield without end"),
        ([], "ended after 0 tokens"),
        ([(97, -1.0), (12.7, -1.0)], r"`continued` of Worker yielded 12\.7 \(float\) as token 1, wanted an integer"),
        ([("a", -1.0)], r"yielded 'a' \(str\) as token 0"),
    ],
)
def test_an_engine_that_breaks_the_contract_of_its_stream_is_named(stream: list[Any], words: str) -> None:
    with pytest.raises(PluginError, match=words):
        asyncio.run(asyncio.wait_for(served(worker(stream)), 10))


def test_an_engine_may_yield_the_integers_of_numpy() -> None:
    completion = asyncio.run(served(worker([(np.int32(97), -1.0)] * 4), tokens=4))
    assert completion.tokens.tolist() == [97] * 4


class TestOfLetters(GeneratorContract):
    def make(self, context: RoleContext) -> Any:
        return PARTS.LettersGenerator(PARTS.Letters(count=5), context)

    def test_its_config_reaches_the_worker(self, subject: Subject) -> None:
        (completion,) = subject.ask(subject.request(max_tokens=200))
        assert set(completion.tokens) == set(range(97, 102))

    def test_a_stop_string_ends_a_completion(self, subject: Subject) -> None:
        (completion,) = subject.ask(subject.request(max_tokens=200, stop=("ab", "ba")))
        text = bytes(completion.tokens.tolist()).decode()
        assert completion.stop == "stop"
        assert text[-2:] in ("ab", "ba")
        assert not {"ab", "ba"} & {text[i : i + 2] for i in range(len(text) - 2)}

    def test_a_prompt_without_room_fails(self, subject: Subject) -> None:
        with pytest.raises(WhetError, match="a prompt of 400 tokens, wanted 1 to 399"):
            subject.ask(subject.request([5] * 400))
        (completion,) = subject.ask(subject.request([5] * 398, max_tokens=9))
        assert (len(completion.tokens), completion.stop) == (2, "length")

    def test_after_a_refused_weight_sync_nothing_is_served_until_another(self, subject: Subject) -> None:
        good, bad = (self._spec(subject, "disk", version) for version in (71, 72))
        empty = subject.scratch / "empty"
        empty.mkdir()
        self._sync(subject, good, [])
        with pytest.raises((WeightSyncError, WorkerError), match="weights of version 72 were not taken: nothing was"):
            subject.generator.receive_weights(evolve(bad, address=str(empty)), 72).result()
        with pytest.raises(WhetError, match="the last weight sync failed"):
            subject.ask(subject.request())
        self._sync(subject, self._spec(subject, "disk", 73), [])
        (completion,) = subject.ask(subject.request())
        assert completion.versions == ((0, 73),)
