"""The generator keeps the contract with a real engine: asked from this process, and from two workers with one each."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.data.records import Completion
from whet.interfaces.workers import RoleContext
from whet_sglang.arguments import ENGINE
from whet_sglang.config import SglangConfig
from whet_sglang.generator import SglangGenerator
from whet_testing.contracts.generator import ModelGeneratorContract
from whet_testing.reference import Reference
from whet_testing.served import TOLERANCE, Subject, gap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not ENGINE.is_here, reason="SGLang is not installed; `nox -s 'engines(sglang)'` has it"),
]


class Contract(ModelGeneratorContract):
    """All rules on one engine, for they take long to start."""

    transports = ("shared-memory", "broadcast", "disk")
    on_weight_update = ("drain", "continue", "abort")
    deadline_seconds = 120.0
    survives_refusals = True

    def make(self, context: RoleContext) -> SglangGenerator:
        return SglangGenerator(SglangConfig(cache_gib=0.125), context)


class TestInThisProcess(Contract):
    @pytest.fixture
    def probe(self, subject: Subject) -> Any:
        """Put a worker of the tests into the engine's process."""
        (worker,) = subject.generator._replicas.workers._workers  # type: ignore[attr-defined]
        place = worker._cluster.worker_group("sglang-generator-0")
        return place.spawn(f"file:{Path(__file__).parent / 'probe.py'}:Probe", {})

    def test_what_a_prompts_beginning_left_in_the_cache_is_forgotten_with_the_weights(
        self, subject: Subject, reference: Reference, other: Reference
    ) -> None:
        prompt = np.random.default_rng(0).integers(3, 300, 200)
        for version, model in ((5001, other), (5002, reference)):
            subject.ask(subject.request(prompt))
            self._sync(subject, self._spec(subject, "shared-memory", version), model.weights())
            request = subject.request(prompt)
            assert gap(model, request, subject.ask(request)[0], 1.0) < TOLERANCE

    @pytest.mark.parametrize(
        "left_out", [("k_proj",), ("up_proj",), ("layers.1.self_attn.v_proj",), ("norm", "proj")], ids=str
    )
    def test_a_part_of_a_fused_module_or_of_the_model_is_refused_and_the_old_weights_stay(
        self, subject: Subject, reference: Reference, other: Reference, left_out: tuple[str, ...]
    ) -> None:
        weights = [(n, t) for n, t in other.weights() if not any(part in n for part in left_out)]
        with pytest.raises(Exception, match="parameters were not sent"):
            self._sync(subject, self._spec(subject, "shared-memory", 5100), weights)
        request = subject.request(seed=3)
        assert gap(reference, request, subject.ask(request)[0], 1.0) < TOLERANCE

    def test_what_would_not_be_finite_is_refused_and_a_whole_weight_sync_mends_it(
        self, subject: Subject, reference: Reference
    ) -> None:
        spoilt = [(n, t * float("nan") if "up_proj" in n else t) for n, t in reference.weights()]
        with pytest.raises(Exception, match="not finite"):
            self._sync(subject, self._spec(subject, "shared-memory", 5200), spoilt)
        with pytest.raises(Exception, match="no weights to use, as the last weight sync failed"):
            subject.ask(subject.request())
        self._sync(subject, self._spec(subject, "shared-memory", 5201), reference.weights())
        request = subject.request(seed=3)
        assert gap(reference, request, subject.ask(request)[0], 1.0) < TOLERANCE

    def test_an_aborted_request_takes_none_with_it_whose_name_begins_like_its_own(self, subject: Subject) -> None:
        (worker,) = subject.generator._replicas.workers._workers  # type: ignore[attr-defined]
        short, long = (evolve(subject.request(max_tokens=120), id=id_) for id_ in ("same-1", "same-10"))

        async def both() -> list[Completion]:
            tasks = [asyncio.ensure_future(subject.generator.generate(r)) for r in (short, long)]
            await asyncio.sleep(0.1)
            async for _ in worker.abort(["same-1"]):
                pass
            return await asyncio.gather(*tasks)

        first, second = subject.run(both())
        assert (second.stop, len(second.tokens)) == ("length", 120)
        assert first.stop == "abort", "it had ended before it was aborted; ask for more tokens"

    def test_what_sglang_refuses_by_its_answer_alone_is_an_error(
        self, subject: Subject, probe: Any, reference: Reference, other: Reference
    ) -> None:
        (answer,) = probe.call("update_without_session")
        assert not answer[0], "it raises nothing: the trap is there"
        assert "must run between begin_weight_update() and end_weight_update()" in answer[1]
        assert probe.call("open_session") == [[True, "Success"]]
        with pytest.raises(Exception, match="SGLang a weight-update session is already open"):
            self._sync(subject, self._spec(subject, "shared-memory", 5300), other.weights())
        probe.call("close_session")
        self._sync(subject, self._spec(subject, "shared-memory", 5301), reference.weights())
        request = subject.request(seed=3)
        assert gap(reference, request, subject.ask(request)[0], 1.0) < TOLERANCE

    def test_a_stop_string_is_found_in_more_tokens_than_it_has_by_itself(self, subject: Subject, probe: Any) -> None:
        stop = "answer"
        spelt = [subject.tokenizer.convert_tokens_to_ids(letter) for letter in stop]
        (found,) = probe.call("finds", spelt, stop)
        assert found["looked_at"] < len(spelt), "the trap is not there; take a longer word that the tokenizer knows"
        assert found["found"]
        assert probe.call("finds", spelt[:-1], stop)[0]["found"] is False


class TestOnTwoReplicas(Contract):
    processes = 2
    transports = ("shared-memory",)
