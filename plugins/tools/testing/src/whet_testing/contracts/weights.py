"""The rules of a generator that receives new weights; part of `ModelGeneratorContract`."""

import asyncio
import functools
import uuid
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.data.records import Completion, Request
from whet.errors import WeightSyncError, WhetError, WorkerError
from whet.interfaces.generator import OnWeightUpdate
from whet.interfaces.weights import STREAMED, TransferSpec
from whet.rollout.complete import complete
from whet_testing.deadline import deadline
from whet_testing.reference import Reference
from whet_testing.served import PROMPTS, TOLERANCE, Subject, gap
from whet_weights import transfer
from whet_weights.exchange import Exchange


class WeightSyncs:
    """Weight syncs of a generator under test, and the rule of all generators that take weights."""

    transports: tuple[str, ...] = ("disk",)
    """Transports to test, named as in the facts of the component. They must work on the worker group of `context`.
    Empty: the generator takes no weights."""
    processes: int
    receivers: int = 0
    """Number of processes that receive weights; 0: the same number as `processes`."""

    def weights(self, folder: Path) -> list[tuple[str, Any]]:
        """Return all weights (name, tensor) that it takes: those of the model folder. Override it for another model."""
        return Reference(folder).weights()

    def test_the_version_of_weights_is_the_one_that_they_came_with(self, subject: Subject) -> None:
        if not self.transports:
            pytest.skip("it takes no weights")
        weights = self.weights(subject.folder)
        for version in (57, 58, 3):
            self._sync(subject, self._spec(subject, self.transports[0], version), weights)
            (completion,) = subject.ask(subject.request(seed=version))
            found = [number for _, number in completion.versions]
            assert found == [version], (
                f"tokens of version {version} of the weights name {found}. A resumed run goes on with the versions of "
                "its steps: take over the `version` of `receive_weights`, and count nothing"
            )

    def _spec(self, subject: Subject, transport: str, version: int) -> TransferSpec:
        session = f"{version}-{uuid.uuid4().hex}"
        more: dict[str, Any] = {}
        if transport in STREAMED:
            address, token = _exchange().address, _exchange().token
            receivers = self.receivers or max(1, self.processes)
            more = {"token": token, "receivers": receivers}
        else:
            folder = subject.scratch / f"weights-{transport}"
            folder.mkdir(exist_ok=True)
            address = str(folder)
        return TransferSpec(transport, address, session, version, timeout_seconds=30.0, **more)

    def _sync(self, subject: Subject, spec: TransferSpec, weights: list[tuple[str, Any]]) -> None:
        """Send and receive weights: at the same time if the transport streams, else one after the other."""
        if spec.transport not in STREAMED:
            transfer.send(spec, weights)
            self._receive(subject, spec)
            return
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(transfer.send, spec, weights)
            self._receive(subject, spec)
            sent.result()

    def _receive(self, subject: Subject, spec: TransferSpec) -> None:
        with deadline(subject.deadline_seconds, "a weight sync"):
            subject.generator.receive_weights(spec, spec.version).result()


class WeightRules(WeightSyncs):
    """Rules for a contract that sets the fields below and has the fixtures of `ModelGeneratorContract`."""

    on_weight_update: tuple[OnWeightUpdate, ...]

    def test_synced_weights_are_used_from_then_on(
        self, subject: Subject, reference: Reference, other: Reference
    ) -> None:
        for number, transport in enumerate(self.transports, start=1):
            for version, model in ((10 * number, other), (10 * number + 1, reference)):
                self._sync(subject, self._spec(subject, transport, version), model.weights())
                request = subject.request(seed=version, max_tokens=16)
                (completion,) = subject.ask(request)
                assert completion.versions == ((0, version),)
                assert gap(model, request, completion, 1.0) < TOLERANCE

    def test_weights_that_come_while_it_sleeps_are_those_that_it_wakes_with(
        self, subject: Subject, reference: Reference, other: Reference
    ) -> None:
        for version, model, again in ((501, other, False), (502, reference, True)):
            subject.generator.sleep()
            self._sync(subject, self._spec(subject, self.transports[0], version), model.weights())
            if again:
                subject.generator.sleep()
            with pytest.raises(WhetError, match="sleep"):
                subject.ask(subject.request())
            subject.generator.wake()
            request = subject.request(seed=version, max_tokens=16)
            (completion,) = subject.ask(request)
            assert completion.versions == ((0, version),)
            assert gap(model, request, completion, 1.0) < TOLERANCE

    @pytest.mark.parametrize("how", ["drain", "continue", "abort"])
    def test_what_is_under_way_when_weights_arrive_says_which_made_it(
        self, subject: Subject, reference: Reference, other: Reference, how: OnWeightUpdate
    ) -> None:
        if how not in self.on_weight_update:
            pytest.skip(f"its facts do not name {how}")
        seen = 0
        for attempt in range(20):
            version = 1000 * (1 + self.on_weight_update.index(how)) + 2 * attempt
            self._sync(subject, self._spec(subject, self.transports[0], version), reference.weights())
            spec = self._spec(subject, self.transports[0], version + 1)
            requests = [subject.request(PROMPTS[i], i, max_tokens=60 * (i + 1)) for i in range(4)]
            completions, later = self._sync_meanwhile(subject, spec, other, requests, how)
            for request, completion in zip(requests, completions, strict=True):
                seen += self._kept_its_word(request, completion, how, (version, reference), (version + 1, other))
            assert later.versions == ((0, version + 1),), "a later request got old weights"
            if seen:
                break
        self._sync(subject, self._spec(subject, self.transports[0], 4000), reference.weights())
        assert seen, "in twenty attempts no request was under way when weights arrived"

    def test_a_request_that_weights_cut_short_ends_at_its_stop_token(
        self, subject: Subject, reference: Reference, other: Reference
    ) -> None:
        if "abort" not in self.on_weight_update:
            pytest.skip("its facts do not name abort")
        stops = tuple(range(0, 384, 8))
        for version, model in ((5001, other), (5002, reference)):
            spec = self._spec(subject, self.transports[0], version)
            requests = [subject.request(seed=seed, stop_tokens=stops, max_tokens=48) for seed in range(32)]
            completions, _ = self._sync_meanwhile(subject, spec, model, requests, "abort", whole=True)
            for completion in completions:
                assert not np.isin(completion.tokens[:-1], stops).any(), "it went on after a stop token"
                assert np.isin(completion.tokens[-1:], stops).any() == (completion.stop == "stop")

    def _sync_meanwhile(
        self, subject: Subject, spec: TransferSpec, model: Reference, requests: list[Request], how: OnWeightUpdate,
        whole: bool = False,
    ) -> tuple[list[Completion], Completion]:  # fmt: skip
        """Hand weights over while requests run. Return their completions, and the completion of a later request.

        `whole`: with the rest of what was cut short, as a run asks for it.
        """

        def ask(request: Request) -> Coroutine[Any, Any, Completion]:
            return (
                complete(subject.generator, request, subject.decode) if whole else subject.generator.generate(request)
            )

        async def meanwhile() -> tuple[list[Completion], Completion]:
            tasks = [asyncio.ensure_future(ask(request)) for request in requests]
            await asyncio.sleep(0.02)
            await asyncio.to_thread(transfer.send, spec, model.weights())
            await asyncio.to_thread(lambda: subject.generator.receive_weights(spec, spec.version, how).result())
            later = await subject.generator.generate(subject.request())
            return await asyncio.gather(*tasks), later

        return subject.run(meanwhile())

    def _kept_its_word(
        self,
        request: Request,
        completion: Completion,
        how: OnWeightUpdate,
        old: tuple[int, Reference],
        new: tuple[int, Reference],
    ) -> bool:
        """Check a completion of a request that was under way when weights arrived.

        Return whether the completion shows that the request was under way at that moment.
        """
        models = dict((old, new))
        if how == "abort" and completion.stop == "abort" and not len(completion.tokens):
            return True
        (_, first), *rest = completion.versions
        assert {version for _, version in completion.versions} <= set(models), "it names a version that never was"
        switch = rest[0][0] if rest else len(completion.tokens)
        assert how == "continue" or not rest, "only a request that is kept may be of two versions"
        assert how == "abort" or completion.stop != "abort", "nothing was to be aborted"
        # After a switch, keys and values come from both models, so no full forward pass gives the same logprobs.
        expected = models[first].logprobs(np.concatenate([request.tokens, completion.tokens]), 1.0)
        apart = np.abs(expected[len(request.tokens) :] - completion.logprobs)[:switch].max()
        assert apart < TOLERANCE, f"tokens that name version {first} were not made by it"
        return {"drain": first == old[0], "continue": bool(rest), "abort": completion.stop == "abort"}[how]

    def test_a_weight_sync_that_lacks_a_weight_is_refused(
        self, own: Subject, reference: Reference, other: Reference
    ) -> None:
        for number, transport in enumerate(self.transports, start=1):
            with pytest.raises((WeightSyncError, WorkerError)):
                self._sync(own, self._spec(own, transport, number), other.weights()[:-1])
            self._serves_old_weights_or_none(own, reference)

    def test_a_weight_sync_of_another_version_is_refused(
        self, own: Subject, reference: Reference, other: Reference
    ) -> None:
        for number, transport in enumerate(self.transports, start=1):
            sent = evolve(self._spec(own, transport, number), timeout_seconds=10.0)
            transfer.send(sent, other.weights())
            with pytest.raises((WeightSyncError, WorkerError)):
                self._receive(own, evolve(sent, version=number + 1))
            self._serves_old_weights_or_none(own, reference)

    def test_after_a_refused_weight_sync_a_whole_one_is_taken(
        self, own: Subject, reference: Reference, other: Reference
    ) -> None:
        if self.processes > 1:
            pytest.skip("after a rank has failed the others are in an unknown state: the run ends")
        for number, transport in enumerate(self.transports, start=1):
            with pytest.raises((WeightSyncError, WorkerError)):
                self._sync(own, self._spec(own, transport, 10 * number), reference.weights()[:-1])
            self._sync(own, self._spec(own, transport, 10 * number + 1), other.weights())
            request = own.request(seed=9)
            assert gap(other, request, own.ask(request)[0], 1.0) < TOLERANCE

    def _serves_old_weights_or_none(self, subject: Subject, reference: Reference) -> None:
        request = subject.request(seed=9)
        try:
            (completion,) = subject.ask(request)
        except WhetError:
            return
        assert gap(reference, request, completion, 1.0) < TOLERANCE, "half of the new weights are in use"


@functools.cache
def _exchange() -> Exchange:
    """Return the exchange at which senders and receivers of this test session meet."""
    return Exchange("127.0.0.1")
