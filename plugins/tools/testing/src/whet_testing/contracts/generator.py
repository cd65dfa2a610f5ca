"""The rules that every generator must keep.

    class TestHF(ModelGeneratorContract):
        transports = ("shared-memory", "disk")

        def make(self, context: RoleContext) -> HfGenerator:
            return HfGenerator(HfConfig(), context)

`ModelGeneratorContract` is for generators that serve a model folder, as all but stand-ins do. Its rules also compare
completions with `transformers`. A subclass with `processes = 1` tests the same rules on a worker process.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.component import GeneratorFacts
from whet.data.records import Completion, Progress, Request
from whet.errors import WhetError
from whet.interfaces.generator import Generator, Listener, OnWeightUpdate
from whet.interfaces.workers import RoleContext
from whet_start.small_models import make_model
from whet_testing.contracts.placed import Placed, WorkerGroups, on_gpu
from whet_testing.contracts.weights import WeightRules, WeightSyncs
from whet_testing.reference import Reference
from whet_testing.served import PROMPTS, TOLERANCE, Subject, gap


class GeneratorContract(WeightSyncs, Placed):
    """Inherit this class and override `make`."""

    deadline_seconds: float = 60.0
    """Deadline of a few short requests."""

    def make(self, context: RoleContext) -> Generator:
        """Build the generator under test."""
        raise NotImplementedError("override `make` to build the generator")

    @pytest.fixture(scope="class")
    @classmethod
    def subject(
        cls,
        tmp_path_factory: pytest.TempPathFactory,
        tiny_model_folder: Path,
        tiny_tokenizer: Any,
        groups: WorkerGroups,
    ) -> Iterator[Subject]:
        """Yield one generator for all rules, and close it twice afterwards."""
        with cls().built(tmp_path_factory.mktemp("generator"), tiny_model_folder, tiny_tokenizer, groups) as subject:
            yield subject

    @contextmanager
    def built(self, folder: Path, model_folder: Path, tokenizer: Any, groups: WorkerGroups) -> Iterator[Subject]:
        """Yield a generator in an event loop of its own, and close both afterwards."""
        with asyncio.Runner() as runner:
            generator = self.make(self.context(folder, "generator", model_folder, groups))
            yield Subject(generator, model_folder, tokenizer, folder, self.deadline_seconds, runner)
            generator.close()
            generator.close()

    def test_it_is_a_generator(self, subject: Subject) -> None:
        assert isinstance(subject.generator, Generator)

    def test_a_completion_belongs_to_its_request(self, subject: Subject) -> None:
        requests = [subject.request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
        assert [c.id for c in subject.ask(*requests)] == [r.id for r in requests]

    def test_every_token_has_a_logprob(self, subject: Subject) -> None:
        for completion in subject.ask(*[subject.request(prompt) for prompt in PROMPTS]):
            assert completion.tokens.dtype == np.int64
            assert completion.logprobs.dtype == np.float32
            assert completion.tokens.shape == completion.logprobs.shape
            assert len(completion.tokens) > 0

    def test_logprobs_are_finite_and_at_most_0(self, subject: Subject) -> None:
        for temperature in (0.0, 0.3, 1.0):
            (completion,) = subject.ask(subject.request(temperature=temperature))
            assert np.isfinite(completion.logprobs).all()
            assert (completion.logprobs <= 0).all()

    def test_the_stop_token_is_kept_as_the_last(self, subject: Subject) -> None:
        stops = tuple(range(0, 384, 4))
        requests = [subject.request(seed=seed, stop_tokens=stops, max_tokens=32) for seed in range(8)]
        completions = subject.ask(*requests)
        assert any(c.stop == "stop" for c in completions)
        for completion in completions:
            assert not np.isin(completion.tokens[:-1], stops).any(), "it went on after a stop token"
            assert np.isin(completion.tokens[-1:], stops).any() == (completion.stop == "stop")

    @pytest.mark.parametrize("most", [1, 2, 7])
    def test_a_completion_without_stop_is_as_long_as_its_limit(self, subject: Subject, most: int) -> None:
        for completion in subject.ask(*[subject.request(prompt, max_tokens=most) for prompt in PROMPTS]):
            assert (len(completion.tokens), completion.stop) == (most, "length")

    def test_requests_of_one_message_may_have_different_limits(self, subject: Subject) -> None:
        limits = [3, 1, 9, 5]
        completions = subject.ask(*[subject.request(max_tokens=most, seed=most) for most in limits])
        assert [len(c.tokens) for c in completions] == limits

    def test_the_same_request_gives_the_same_tokens(self, subject: Subject) -> None:
        once, twice = (subject.ask(subject.request(seed=3, max_tokens=16))[0] for _ in range(2))
        assert np.array_equal(once.tokens, twice.tokens)
        np.testing.assert_allclose(once.logprobs, twice.logprobs, atol=1e-5)

    def test_another_seed_gives_other_tokens(self, subject: Subject) -> None:
        completions = subject.ask(*[subject.request(seed=seed, max_tokens=16) for seed in range(4)])
        assert len({tuple(c.tokens) for c in completions}) == 4

    def test_company_changes_nothing(self, subject: Subject) -> None:
        alone = [subject.ask(subject.request(prompt, seed))[0] for seed, prompt in enumerate(PROMPTS)]
        company = [subject.request([30 + i] * (i + 1), 100 + i, max_tokens=3 + i) for i in range(6)]
        requests = [subject.request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
        together = subject.ask(*company[:3], *requests, *company[3:])[3:-3]
        for one, other in zip(alone, together, strict=True):
            assert np.array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)

    def test_a_shared_prefix_changes_nothing(self, subject: Subject) -> None:
        apart = subject.ask(*[subject.request(seed=seed) for seed in range(4)])
        shared = subject.ask(*[subject.request(seed=seed, prefix="p") for seed in range(4)])
        for one, other in zip(apart, shared, strict=True):
            assert np.array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)

    def test_temperature_0_does_not_depend_on_the_seed(self, subject: Subject) -> None:
        completions = subject.ask(*[subject.request(seed=seed, temperature=0.0) for seed in range(3)])
        assert len({tuple(c.tokens) for c in completions}) == 1

    def test_versions_cover_all_tokens(self, subject: Subject) -> None:
        for completion in subject.ask(*[subject.request(prompt) for prompt in PROMPTS]):
            starts = [start for start, _ in completion.versions]
            versions = [version for _, version in completion.versions]
            assert starts[0] == 0
            assert starts == sorted(set(starts))
            assert starts[-1] < len(completion.tokens)
            assert versions == sorted(versions)

    def test_many_requests_at_a_time_are_all_served(self, subject: Subject) -> None:
        requests = [subject.request(PROMPTS[i % 5], i, max_tokens=1 + i % 4) for i in range(64)]
        assert [len(c.tokens) for c in subject.ask(*requests)] == [1 + i % 4 for i in range(64)]

    def test_many_long_prompts_at_a_time_are_all_served(self, subject: Subject) -> None:
        prompts = [np.random.default_rng(i).integers(3, 300, 200) for i in range(24)]
        found = subject.ask(*[subject.request(prompt, i, max_tokens=4) for i, prompt in enumerate(prompts)])
        (alone,) = subject.ask(subject.request(prompts[-1], 23, max_tokens=4))
        assert [len(c.tokens) for c in found] == [4] * 24
        assert np.array_equal(found[-1].tokens, alone.tokens)

    def test_a_cancelled_request_leaves_the_others_alone(self, subject: Subject) -> None:
        expected = subject.ask(subject.request(seed=1), subject.request(seed=2))

        async def cancel_the_first() -> list[Completion]:
            first, *rest = (
                asyncio.ensure_future(subject.generator.generate(request))
                for request in (subject.request(max_tokens=200), subject.request(seed=1), subject.request(seed=2))
            )
            for _ in range(20):
                await asyncio.sleep(0)
            first.cancel()
            found = await asyncio.gather(*rest)
            assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ in (
                asyncio.CancelledError, Completion,
            )  # fmt: skip
            return found

        found = subject.run(cancel_the_first())
        assert [c.tokens.tolist() for c in found] == [c.tokens.tolist() for c in expected]
        (later,) = subject.ask(subject.request(seed=1))
        assert np.array_equal(later.tokens, expected[0].tokens)

    def test_after_sleep_and_wake_it_serves_as_before(self, subject: Subject) -> None:
        (before,) = subject.ask(subject.request(seed=5))
        subject.generator.sleep()
        subject.generator.wake()
        (after,) = subject.ask(subject.request(seed=5))
        assert np.array_equal(before.tokens, after.tokens)

    def test_asleep_it_refuses_requests_and_to_sleep_or_wake_twice_is_once(self, subject: Subject) -> None:
        (before,) = subject.ask(subject.request(seed=6))
        given = [subject.generator.sleep(), subject.generator.sleep()]
        assert not given[1]
        with pytest.raises(WhetError, match="sleep"):
            subject.ask(subject.request(seed=6))
        subject.generator.wake()
        subject.generator.wake()
        (after,) = subject.ask(subject.request(seed=6))
        assert np.array_equal(before.tokens, after.tokens)


class ModelGeneratorContract(WeightRules, GeneratorContract):
    """The contract of generators that serve a model folder. Inherit this class and override `make`."""

    on_weight_update: tuple[OnWeightUpdate, ...] = ("drain",)
    """Modes to test, named as in the facts: how running requests are treated when new weights arrive."""
    gpu_tolerance: float = 0.2
    """Largest allowed difference of a logprob on a GPU, in nats. An engine may have to compute in bfloat16 there."""
    survives_refusals: bool = False
    """Whether the generator stays usable after it refused weights. If so, one generator serves all rules."""

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, tiny_model_folder: Path) -> Reference:
        """Return the same model, loaded by `transformers`."""
        return Reference(tiny_model_folder)

    @pytest.fixture(scope="class")
    @classmethod
    def other(cls, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Reference:
        """Return a model of the same architecture with other weights."""
        return Reference(make_model(tmp_path_factory.mktemp("other-model"), tiny_tokenizer, seed=7))

    def facts(self) -> GeneratorFacts | None:
        """Return the facts of the generator that `make` builds. None skips the comparison."""
        return None

    def test_its_facts_name_what_is_tested_here(self) -> None:
        facts = self.facts()
        if facts is None:
            pytest.skip("override `facts` to compare them")
        assert set(facts.on_weight_update) == set(self.on_weight_update), (
            f"its facts name {facts.on_weight_update} for running requests, and these tests try "
            f"{self.on_weight_update}: change the facts, or `on_weight_update` of the tests"
        )
        unknown = sorted(set(self.transports) - set(facts.transports))
        assert not unknown, f"its facts do not name the transports {unknown}, with which it is tested"

    @pytest.fixture
    def own(
        self,
        request: pytest.FixtureRequest,
        tmp_path: Path,
        tiny_model_folder: Path,
        tiny_tokenizer: Any,
        groups: WorkerGroups,
    ) -> Iterator[Subject]:
        """Yield a generator for one rule alone. The rule may leave the generator unusable."""
        if self.survives_refusals:
            subject, reference = request.getfixturevalue("subject"), request.getfixturevalue("reference")
            yield subject
            self._sync(subject, self._spec(subject, self.transports[0], 9000), reference.weights())
            return
        with self.built(tmp_path, tiny_model_folder, tiny_tokenizer, groups) as subject:
            yield subject

    @pytest.mark.gpu
    def test_on_a_gpu_its_memory_is_free_for_others_while_it_sleeps(self, tmp_path: Path, tiny_tokenizer: Any) -> None:
        import torch

        self.need_one_gpu()

        models = [make_model(tmp_path / f"m{s}", tiny_tokenizer, hidden=512, layers=4, seed=s) for s in range(2)]
        own, other = map(Reference, models)
        weights = sum(file.stat().st_size for file in models[0].glob("*.safetensors"))
        with self.built(tmp_path, models[0], tiny_tokenizer, on_gpu) as subject:
            request = subject.request(seed=3, max_tokens=16)
            assert gap(own, request, subject.ask(request)[0], 1.0) < self.gpu_tolerance
            awake = torch.cuda.mem_get_info()[0]
            subject.generator.sleep()
            assert torch.cuda.mem_get_info()[0] - awake > 0.4 * weights, (
                "the folder's numbers have 4 bytes, its own perhaps 2"
            )
            subject.generator.wake()
            assert gap(own, request, subject.ask(request)[0], 1.0) < self.gpu_tolerance
            subject.generator.sleep()
            asleep = torch.cuda.mem_get_info()[0]
            self._sync(subject, self._spec(subject, "disk", 1), other.weights())
            assert torch.cuda.mem_get_info()[0] < asleep - 0.4 * weights, "new weights were taken nowhere"
            subject.generator.wake()
            (completion,) = subject.ask(request)
            assert completion.versions == ((0, 1),)
            assert gap(other, request, completion, 1.0) < self.gpu_tolerance

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_those_of_a_full_forward(
        self, subject: Subject, reference: Reference, temperature: float
    ) -> None:
        requests = [subject.request(p, i, temperature=temperature, max_tokens=24) for i, p in enumerate(PROMPTS)]
        for request, completion in zip(requests, subject.ask(*requests), strict=True):
            assert gap(reference, request, completion, temperature) < TOLERANCE

    def test_temperature_0_takes_the_likeliest_token_with_its_logprob_at_1(
        self, subject: Subject, reference: Reference
    ) -> None:
        request = subject.request(temperature=0.0, max_tokens=16)
        (completion,) = subject.ask(request)
        follows = _follows(reference, request, completion, 1.0)
        chosen = np.take_along_axis(follows, completion.tokens[:, None], -1)[:, 0]
        assert (chosen >= follows.max(-1) - TOLERANCE).all()
        assert gap(reference, request, completion, 1.0) < TOLERANCE

    def test_tokens_are_drawn_with_their_probabilities(self, subject: Subject, reference: Reference) -> None:
        requests = [subject.request(seed=seed, temperature=0.1, max_tokens=1, prefix="p") for seed in range(1024)]
        drawn = np.array([reply.tokens[0] for reply in subject.ask(*requests)])
        follows = reference.likelihoods(PROMPTS[0], 0.1)[-1]
        entropy = -(np.exp(follows) * follows).sum()
        spread = np.sqrt((np.exp(follows) * (follows + entropy) ** 2).sum() / len(drawn))
        assert abs(follows[drawn].mean() + entropy) < 5 * spread
        likeliest = np.exp(follows.max())
        share = (drawn == follows.argmax()).mean()
        assert abs(share - likeliest) < 5 * np.sqrt(likeliest * (1 - likeliest) / len(drawn))

    def test_top_k_keeps_to_the_likeliest(self, subject: Subject, reference: Reference) -> None:
        request = subject.request(top_k=3, max_tokens=24)
        (completion,) = subject.ask(request)
        follows = _follows(reference, request, completion, 1.0)
        third = np.sort(follows, -1)[:, -3]
        assert (np.take_along_axis(follows, completion.tokens[:, None], -1)[:, 0] >= third - TOLERANCE).all()

    def test_top_p_keeps_to_the_nucleus(self, subject: Subject, reference: Reference) -> None:
        request = subject.request(top_p=0.3, max_tokens=24)
        (completion,) = subject.ask(request)
        follows = _follows(reference, request, completion, 1.0)
        chosen = np.take_along_axis(follows, completion.tokens[:, None], -1)
        likelier = np.where(follows > chosen + TOLERANCE, np.exp(follows), 0).sum(-1)
        assert (likelier < 0.3 + 1e-3).all(), "a token came although likelier ones have the probability already"

    def test_tokens_up_to_the_one_that_completes_a_stop_string_are_kept(self, subject: Subject) -> None:
        for request, tokens, stop in _stop_strings(subject):
            again = evolve(request, id=f"{request.id}-again", sampling=evolve(request.sampling, stop=(stop, "never")))
            (completion,) = subject.ask(again)
            assert completion.stop == "stop"
            assert completion.tokens.tolist() == tokens.tolist(), f"stop string {stop!r}"

    def test_a_stop_string_of_the_prompt_does_not_count(self, subject: Subject) -> None:
        prompt = subject.tokenizer.encode("42 42", add_special_tokens=False)
        (completion,) = subject.ask(subject.request(prompt, stop=("42",), max_tokens=4))
        assert (completion.stop == "stop") == ("42" in subject.decode(completion.tokens))

    @pytest.mark.parametrize("wanted", [0, 3])
    def test_tokens_are_reported_while_they_are_sampled_as_its_facts_say(
        self, subject: Subject, reference: Reference, wanted: int
    ) -> None:
        heard, needed = list[Progress](), {"progress", "likeliest"} if wanted else {"progress"}
        if missing := needed - self._extras():
            pytest.skip(f"its facts do not name {', '.join(sorted(missing))}")
        request = subject.request(temperature=0.7, max_tokens=12)
        (silent,) = subject.ask(evolve(request, id=f"{request.id}-silent"))
        completion = subject.heard(request, Listener(heard.append, wanted))
        assert completion.tokens.tolist() == silent.tokens.tolist(), "reporting changes the tokens"
        assert len(heard) > 1, "all tokens were reported at once"
        assert [p.begin for p in heard] == np.cumsum([0, *(len(p.tokens) for p in heard[:-1])]).tolist()
        assert np.concatenate([p.tokens for p in heard]).tolist() == completion.tokens.tolist()
        assert np.allclose(np.concatenate([p.logprobs for p in heard]), completion.logprobs, atol=TOLERANCE)
        tokens = np.concatenate([p.likeliest for p in heard])
        found = np.concatenate([p.likeliest_logprobs for p in heard])
        follows = _follows(reference, request, completion, 0.7)
        assert tokens.shape == found.shape == (12, wanted)
        assert np.allclose(found, -np.sort(-follows, -1)[:, :wanted], atol=TOLERANCE)
        assert np.allclose(found, np.take_along_axis(follows, tokens, -1), atol=TOLERANCE)

    def test_a_json_schema_is_kept_or_refused_as_its_facts_say(self, subject: Subject) -> None:
        schema = json.dumps({"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]})
        stop = subject.tokenizer.eos_token_id
        request = subject.request(schema=schema, max_tokens=60, stop_tokens=(stop,))
        if "schema" in self._extras():
            text = subject.decode(subject.ask(request)[0].tokens)
            assert json.loads(text)["n"] == 7
        else:
            with pytest.raises(WhetError, match="JSON schema"):
                subject.ask(request)

    def _extras(self) -> frozenset[str]:
        facts = self.facts()
        return facts.extras if facts is not None else frozenset()

    @pytest.mark.parametrize("length", [0, 300])
    def test_a_request_that_cannot_be_served_fails_alone(self, subject: Subject, length: int) -> None:
        async def both() -> list[Any]:
            requests = [subject.request([5] * length), subject.request(seed=4)]
            return await asyncio.gather(*map(subject.generator.generate, requests), return_exceptions=True)

        bad, good = subject.run(both())
        assert isinstance(bad, WhetError), f"a prompt of {length} tokens for a model of 256 positions gave {bad!r}"
        assert isinstance(good, Completion)


def _follows(reference: Reference, request: Request, completion: Completion, temperature: float) -> Any:
    """Return log_softmax(logits / temperature) at the position of each token of the completion. -> [L, V]."""
    tokens = np.concatenate([request.tokens, completion.tokens])
    return reference.likelihoods(tokens, temperature)[len(request.tokens) - 1 : -1]


def _stop_strings(subject: Subject) -> list[tuple[Request, Any, str]]:
    """Return (request, tokens up to the end of the stop string, stop string).

    Some stop strings lie within one token, others span two tokens.
    """
    found = []
    for seed in range(20):
        request = subject.request(seed=seed, max_tokens=32)
        (completion,) = subject.ask(request)
        for end in range(3, len(completion.tokens)):
            before, token = subject.decode(completion.tokens[:end]), subject.decode(completion.tokens[end : end + 1])
            last = subject.decode(completion.tokens[end - 1 : end])
            for stop in (token, last[-1:] + token[:1]):
                plain = len(stop) > 1 and stop.isascii() and stop.isprintable() and before + token != before
                if plain and stop not in before and stop in before + token:
                    found.append((request, completion.tokens[: end + 1], stop))
        if len(found) >= 4:
            return found[:4]
    raise AssertionError("no completion held printable text, so stop strings cannot be tested")
