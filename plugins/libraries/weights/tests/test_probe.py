"""What a replica has to show, and when it is asked to."""

import asyncio
from typing import Any

import numpy as np
import pytest

from whet.config.sections import ProbeSection
from whet.data.batch import Batch
from whet.data.records import Completion, Request, Sampling
from whet.data.spans import Spans
from whet.errors import RequestLost, WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet.run.weight_sync import WeightSync
from whet_testing.fakes import Done, FakeBackend
from whet_weights.probe import Probe, Proof, bound_of

SCORED = {(0, (5, 6, 7)): [-1.0, -2.0, -3.0], (1, (8, 9)): [-0.5, -0.25], (0, (5, 1)): [-1.0, -7.0]}
PROOF = Proof(
    4, (np.arange(3), np.arange(2)), Sampling(3), (11, 12), 0.01, "both in float32",
    {key: np.asarray(value, np.float32) for key, value in SCORED.items()},
)  # fmt: skip


def completion(tokens: list[int], logprobs: list[float], version: int = 4) -> Completion:
    return Completion("id", np.asarray(tokens), np.asarray(logprobs, np.float32), "length", ((0, version),))


def test_the_gap_is_the_mean_over_the_tokens_of_all_prompts() -> None:
    made = [completion([5, 6, 7], [-1.0, -2.02, -3.0]), completion([8, 9], [-0.5, -0.24])]
    assert PROOF.check(0, made) == pytest.approx(0.03 / 5, abs=1e-6)


def test_what_the_trainer_has_not_scored_counts_up_to_where_it_differs() -> None:
    made = [completion([5, 6, 4], [-1.0, -2.01, -9.0]), completion([3], [-9.0])]
    assert PROOF.check(0, made) == pytest.approx(0.005, abs=1e-6)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            [completion([5, 6, 7], [-1.0, -2.0, -3.2])],
            "of 3 tokens are 0.0667 nats off on average, 0.2 at most",
        ),
        ([completion([5, 6, 7], [-1.0, float("nan"), -3.0])], "its logprobs of 3 tokens are nan nats off"),
        ([completion([5, 6, 7], [-1.0, -2.0, -3.0], version=3)], "samples with version 3"),
        ([completion([2], [-1.0]), completion([2, 2], [-1.0, -1.0])], "begins none of 2 completions as other replicas"),
    ],
    ids=["far", "no number", "old", "other"],
)
def test_what_is_wrong_is_said(made: list[Completion], said: str) -> None:
    with pytest.raises(WeightSyncError) as caught:
        PROOF.check(2, made)
    assert str(caught.value).startswith("after the weight sync of version 4 replica 2 of the generator ")
    assert said in str(caught.value)


def test_the_coarser_dtype_decides() -> None:
    assert bound_of("float32", "float32") < bound_of("float16", "float32") < bound_of("float32", "bfloat16")
    assert bound_of("fp8", "bfloat16") > bound_of("bfloat16", "bfloat16")


class Halving:
    """Two replicas that make the same of a prompt: tokens by its seed, each as likely as any of two."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.away: set[int] = set()
        self.off = {0: 0.0, 1: 0.0}

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        assert request.replica is not None
        if request.replica in self.away:
            raise RequestLost("away")
        self.asked.append(request)
        tokens = np.random.default_rng(request.seed).integers(2, size=request.sampling.max_tokens)
        logprobs = np.full(len(tokens), np.log(0.5) - self.off[request.replica], np.float32)
        return Completion(request.id, tokens, logprobs, "length", ((0, 7),))

    def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: str = "drain") -> Done:
        return Done()


def made(generator: Halving, batches: list[Batch], base: float = 0.0, **options: Any) -> Probe:
    def score(batch: Batch, weights: str) -> Any:
        batches.append(batch)
        if weights == "base":
            return np.where(batch["loss_mask"], np.log(0.5) + base, 0.0)
        return np.where(batch["loss_mask"], np.log(0.5), 0.0)

    settings = {"opening": (1,), "tokens": np.arange(100, 200), "room": 0, "temperature": 1.0, **options}
    section = ProbeSection(every=5, prompts=3)
    return Probe(
        section, 0, dtypes=("float32", "float32"), replicas=2, generator=generator, score=score, run=asyncio.run,  # type: ignore[arg-type]
        **settings,
    )  # fmt: skip


def test_every_replica_is_asked_the_same_and_the_trainer_once() -> None:
    generator, batches = Halving(), list[Batch]()
    probe = made(generator, batches)
    assert probe(7) is not None
    first, second = ([r for r in generator.asked if r.replica == replica] for replica in (0, 1))
    assert [r.seed for r in first] == [r.seed for r in second]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))
    assert len({r.id for r in generator.asked}) == 6
    assert {len(r.tokens) for r in first} == {17}
    assert all(r.tokens[0] == 1 and r.tokens[1:].min() >= 100 for r in first)
    assert [batch.sequences for batch in batches] == [3]
    assert batches[0]["loss_mask"].sum() == 3 * 8
    (gap,) = probe.metrics().values()
    assert gap.number() < 1e-6
    assert probe.metrics() == {}


def test_the_one_that_is_off_is_named_and_a_low_temperature_allows_more() -> None:
    generator = Halving()
    generator.off[1] = 0.0015
    with pytest.raises(WeightSyncError, match="replica 1 of the generator does not compute"):
        made(generator, [])(7)
    assert made(generator, [], temperature=0.5)(7) is not None


def test_sequences_fit_into_the_room_that_there_is() -> None:
    generator = Halving()
    made(generator, [], room=12)(7)
    assert {len(r.tokens) + r.sampling.max_tokens for r in generator.asked} == {12}


def due(sync: WeightSync, probe: Probe, batches: list[Batch], versions: range) -> list[int]:
    """Hand versions over and give those that were probed."""
    found = []
    for version in versions:
        before = len(batches)
        sync(version=version)
        found += [version] if len(batches) > before else []
    return found


def test_the_first_two_and_every_fifth_are_probed_and_one_after_a_replica_that_nobody_saw(monkeypatch: Any) -> None:
    generator, batches = Halving(), list[Batch]()
    monkeypatch.setattr(Proof, "check", lambda self, replica, completions: 0.0)  # here it is about when
    probe = made(generator, batches)
    sync = WeightSync(TransferSpec("disk", "nowhere", "", 0), Spans())
    sync.connect(FakeBackend(), generator, probe=probe)  # type: ignore[arg-type]
    assert due(sync, probe, batches, range(3, 8)) == [3, 4, 5]
    given: list[Any] = []
    sync.resync(lambda spec, proof=None: given.append((spec, proof)))
    assert given[0][0].version == 7
    assert given[0][1] is None
    assert due(sync, probe, batches, range(8, 12)) == [8, 10]
    sync(version=15)
    sync.resync(lambda spec, proof=None: given.append((spec, proof)))
    assert given[1][1].version == 15
    generator.away = {0, 1}
    assert due(sync, probe, batches, range(20, 21)) == []
    generator.away = {1}
    assert due(sync, probe, batches, range(21, 23)) == [21]


@pytest.mark.parametrize(
    ("off", "base", "passes"), [(0.0, 0.1, True), (5e-4, 0.1, True), (5e-4, 1e-3, False), (0, 0, False)]
)
def test_after_a_trial_the_logprobs_must_be_far_from_those_of_the_base(off: float, base: float, passes: bool) -> None:
    generator, batches = Halving(), list[Batch]()
    generator.off[1] = off
    probe = made(generator, batches, base=base, trial=True)
    sync = WeightSync(TransferSpec("disk", "nowhere", "", 0), Spans())
    sync.connect(FakeBackend(), generator, probe=probe)  # type: ignore[arg-type]
    if passes:
        sync(version=7)
        assert not probe.trial
        assert len(batches) == 3, "with the trial, without it, and after the sync that follows"
        sync(version=7)
        assert len(batches) == 4
    else:
        with pytest.raises(
            WeightSyncError, match=r"replica [01] of the generator does not apply the adapter: .* a random"
        ):
            sync(version=7)
        assert probe.trial
