"""The contract of generators holds for the fake one, and each rule catches one that breaks it."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.component import GeneratorFacts
from whet.data.records import Completion, Request
from whet.interfaces.generator import OnWeightUpdate
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import RoleContext
from whet_testing.contracts.generator import GeneratorContract, ModelGeneratorContract
from whet_testing.fakes import Done, FakeGenerator
from whet_testing.served import Subject


def letters(prompt: str, rng: np.random.Generator) -> str:
    return "".join(chr(letter) for letter in rng.integers(97, 123, 300))


class Fake(GeneratorContract):
    def make(self, context: RoleContext) -> Any:
        return FakeGenerator(letters)


class TestOfTheFake(Fake):
    pass


class Changed(FakeGenerator):
    """A fake whose completions are changed afterwards."""

    def __init__(self) -> None:
        super().__init__(letters)

    async def generate(self, request: Request) -> Completion:
        return self.change(request, await super().generate(request))

    def change(self, request: Request, completion: Completion) -> Completion:
        raise NotImplementedError


class DropsTheStopToken(Changed):
    def change(self, request: Request, completion: Completion) -> Completion:
        if completion.stop != "stop":
            return completion
        return evolve(completion, tokens=completion.tokens[:-1], logprobs=completion.logprobs[:-1])


class LogprobsTooShort(Changed):
    def change(self, request: Request, completion: Completion) -> Completion:
        return evolve(completion, logprobs=completion.logprobs[:-1])


class Probabilities(Changed):
    def change(self, request: Request, completion: Completion) -> Completion:
        return evolve(completion, logprobs=np.exp(completion.logprobs))


class OtherIds(Changed):
    def change(self, request: Request, completion: Completion) -> Completion:
        return evolve(completion, id="x")


class NoVersions(Changed):
    def change(self, request: Request, completion: Completion) -> Completion:
        return evolve(completion, versions=((3, 0),))


class OneTooMany(Changed):
    def change(self, request: Request, completion: Completion) -> Completion:
        return evolve(completion, tokens=np.append(completion.tokens, 99), logprobs=np.append(completion.logprobs, -1))


class SeesItsCompany(Changed):
    def change(self, request: Request, completion: Completion) -> Completion:
        return evolve(completion, tokens=completion.tokens + sum(len(r.tokens) == 1 for r in self.requests))


class SeesThePrefix(Changed):
    def change(self, request: Request, completion: Completion) -> Completion:
        return evolve(completion, logprobs=completion.logprobs - len(request.prefix))


class HasNoSeed(FakeGenerator):
    def __init__(self) -> None:
        super().__init__("a" * 300)


class Drawing(FakeGenerator):
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        super().__init__(lambda prompt, _: letters(prompt, rng))


class AnswersAsleep(FakeGenerator):
    def __init__(self) -> None:
        super().__init__(letters)

    def sleep(self) -> None:
        pass


class NeverEnds(FakeGenerator):
    def __init__(self) -> None:
        super().__init__("a" * 300, delay_seconds=60)


class CountsVersions(FakeGenerator):
    """Begins again at 1 when a resumed run hands over the weights of step 57."""

    def __init__(self) -> None:
        super().__init__(letters)

    def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate = "drain") -> Done:
        return super().receive_weights(spec, self.version + 1)


class NeverGoesBack(CountsVersions):
    """Keeps the highest version, although a rewound run hands over an earlier one."""

    def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate = "drain") -> Done:
        self.version = max(self.version, version)
        return Done()


MUTANTS: dict[type[FakeGenerator], str] = {
    DropsTheStopToken: "test_the_stop_token_is_kept_as_the_last",
    LogprobsTooShort: "test_every_token_has_a_logprob",
    Probabilities: "test_logprobs_are_finite_and_at_most_0",
    OtherIds: "test_a_completion_belongs_to_its_request",
    NoVersions: "test_versions_cover_all_tokens",
    OneTooMany: "test_requests_of_one_message_may_have_different_limits",
    SeesItsCompany: "test_company_changes_nothing",
    SeesThePrefix: "test_a_shared_prefix_changes_nothing",
    HasNoSeed: "test_another_seed_gives_other_tokens",
    Drawing: "test_the_same_request_gives_the_same_tokens",
    AnswersAsleep: "test_asleep_it_refuses_requests_and_to_sleep_or_wake_twice_is_once",
    NeverEnds: "test_every_token_has_a_logprob",
}


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize(("kind", "rule"), MUTANTS.items())
def test_the_contract_catches(kind: Any, rule: str, runner: asyncio.Runner, tmp_path: Path) -> None:
    subject = Subject(kind(), tmp_path, None, tmp_path, 2.0, runner)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Fake(), rule)(subject)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(CountsVersions, r"of version 57 .* name \[1\]"), (NeverGoesBack, r"of version 3 .* name \[58\]")],
)
def test_the_contract_catches_versions_of_its_own(
    kind: Any, message: str, runner: asyncio.Runner, tmp_path: Path, tiny_model_folder: Path
) -> None:
    subject = Subject(kind(), tiny_model_folder, None, tmp_path, 2.0, runner)
    with pytest.raises(AssertionError, match=f"{message}.*take over the `version`"):
        Fake().test_the_version_of_weights_is_the_one_that_they_came_with(subject)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (GeneratorFacts(transports=("disk",), on_weight_update=("drain", "continue")), "these tests try"),
        (GeneratorFacts(transports=("shared",)), r"do not name the transports \['disk'\]"),
        (GeneratorFacts(transports=("shared", "disk")), None),
    ],
)
def test_the_contract_catches_facts_that_differ(facts: GeneratorFacts, message: str | None) -> None:
    contract = ModelGeneratorContract()
    contract.facts = lambda: facts  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=message) if message else nullcontext():
        contract.test_its_facts_name_what_is_tested_here()


def test_the_contract_catches_seeds_that_matter_at_temperature_0(runner: asyncio.Runner, tmp_path: Path) -> None:
    subject = Subject(Drawing(), tmp_path, None, tmp_path, 2.0, runner)
    with pytest.raises(AssertionError):
        Fake().test_temperature_0_does_not_depend_on_the_seed(subject)
