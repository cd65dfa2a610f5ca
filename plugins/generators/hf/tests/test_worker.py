"""The worker batches what waits, aborts what is given up, and serves one version at a time."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from whet.component import AdapterInfo
from whet.data.records import Completion, Request, Sampling
from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerRank
from whet_hf.decode import Job
from whet_hf.worker import Worker, split
from whet_weights.transfer import send


def make_worker(folder: Path, **options: Any) -> Worker:
    settings: dict[str, Any] = {"dtype": "float32", "trust_remote_code": False, "max_batch": 64, "cache_bytes": 1 << 30}
    settings |= {"fused": True, "prefix_caching": True, "scratch": str(folder.parent / "scratch")}
    threads = options.pop("threads", 1)
    return Worker(WorkerRank("generator", 0, 1, threads=threads), path=str(folder), **{**settings, **options})


@pytest.fixture(scope="module")
def worker(tiny_model_folder: Path) -> Iterator[Worker]:
    made = make_worker(tiny_model_folder)
    yield made
    made.close()


@pytest.fixture
def own_worker(tiny_model_folder: Path) -> Iterator[Worker]:
    made = make_worker(tiny_model_folder)
    yield made
    made.close()


async def ask(worker: Worker, requests: list[Request]) -> list[list[Any]]:
    return [outcomes async for outcomes in worker.generate(requests)]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def batches_of(worker: Worker, monkeypatch: Any) -> list[list[str]]:
    """Record the ids of each batch."""
    seen: list[list[str]] = []
    decode = worker._decode
    monkeypatch.setattr(worker, "_decode", lambda jobs: (seen.append([j.request.id for j in jobs]), decode(jobs))[1])
    return seen


def test_completions_of_a_batch_come_together(worker: Worker, requests_of: Any) -> None:
    (outcomes,) = run(ask(worker, requests_of(20)))
    assert {c.id for c in outcomes} == {f"r{i}" for i in range(20)}
    assert all(c.versions == ((0, 0),) for c in outcomes)


def test_what_waits_when_a_batch_ends_forms_the_next(worker: Worker, requests_of: Any, monkeypatch: Any) -> None:
    seen = batches_of(worker, monkeypatch)

    async def three_messages() -> None:
        first = asyncio.create_task(ask(worker, requests_of(3, max_tokens=40)))
        while not seen:
            await asyncio.sleep(0)
        later = [asyncio.create_task(ask(worker, requests_of(2, seed=seed))) for seed in (1, 2)]
        await asyncio.gather(first, *later)

    run(three_messages())
    assert [len(ids) for ids in seen] == [3, 4]


def test_a_batch_is_as_large_as_is_allowed(tiny_model_folder: Path, requests_of: Any, monkeypatch: Any) -> None:
    worker = make_worker(tiny_model_folder, max_batch=8)
    seen = batches_of(worker, monkeypatch)
    outcomes = run(ask(worker, requests_of(20)))
    assert [len(ids) for ids in seen] == [8, 8, 4]
    assert [len(part) for part in outcomes] == [8, 8, 4]


def test_a_batch_is_no_larger_than_the_cache(tiny_model_folder: Path, requests_of: Any, monkeypatch: Any) -> None:
    # 2 layers, keys and values, 2 heads of 16 floats: 512 bytes a token; a request takes up to 10 + 20 tokens.
    worker = make_worker(tiny_model_folder, cache_bytes=512 * 30 * 5)
    seen = batches_of(worker, monkeypatch)
    requests = [Request(str(i), np.arange(10), Sampling(20), i) for i in range(12)]
    run(ask(worker, requests))
    assert [len(ids) for ids in seen] == [5, 5, 2]
    run(ask(worker, [Request("long", np.arange(200) % 50, Sampling(50), 0)]))
    assert seen[-1] == ["long"]


def test_the_cache_of_a_batch_has_room_for_the_longest_prompt_and_the_longest_completion(
    tiny_model_folder: Path, monkeypatch: Any
) -> None:
    worker = make_worker(tiny_model_folder, cache_bytes=512 * 120 * 3, prefix_caching=False)
    seen = batches_of(worker, monkeypatch)
    requests = [Request("prompt", np.arange(100), Sampling(10), 0)]
    requests += [Request(str(i), np.arange(10), Sampling(100), i) for i in range(5)]
    run(ask(worker, requests))
    assert [len(ids) for ids in seen] == [1, 3, 2]
    assert worker._decoder.free() <= 512 * 120 * 3
    requests = [evolve(request, sampling=Sampling(20)) for request in requests]
    run(ask(worker, requests))
    assert [len(ids) for ids in seen[3:]] == [3, 3]
    assert worker._decoder.free() <= 512 * 120 * 3
    worker.close()


def test_messages_may_use_the_same_ids(worker: Worker, requests_of: Any) -> None:
    async def two_messages() -> list[Any]:
        return await asyncio.gather(ask(worker, requests_of(4, seed=1)), ask(worker, requests_of(4, seed=2)))

    together = run(two_messages())
    for seed, (outcomes,) in zip((1, 2), together, strict=True):
        (alone,) = run(ask(worker, requests_of(4, seed=seed)))
        for one, other in zip(sorted(outcomes, key=lambda c: c.id), sorted(alone, key=lambda c: c.id), strict=True):
            assert np.array_equal(one.tokens, other.tokens)


def test_a_completion_ends_at_the_model_s_last_position(worker: Worker) -> None:
    ((completion,),) = run(ask(worker, [Request("a", np.arange(250), Sampling(50), 0)]))
    assert (len(completion.tokens), completion.stop) == (6, "length")


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request("a", np.arange(256), Sampling(5), 0), "prompt of 256 tokens.*256 positions"),
        (Request("a", np.arange(0), Sampling(5), 0), "empty prompt"),
        (Request("a", np.array([3, 384]), Sampling(5), 0), "outside the vocabulary of 384"),
        (Request("a", np.array([3, -1]), Sampling(5), 0), "outside the vocabulary"),
        (Request("a", np.array([3]), Sampling(5, temperature=1e-40), 0), "temperature 1e-40"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(worker: Worker, request_: Request, why: str) -> None:
    import re

    good = Request("b", np.arange(5), Sampling(3), 0)
    ((refused,), (served,)) = run(ask(worker, [request_, good]))
    assert refused[0] == "a"
    assert re.search(why, refused[1])
    assert isinstance(served, Completion)


class Gate:
    """Holds all threads of a decoder at one of its first steps until it is opened."""

    def __init__(self, worker: Worker, monkeypatch: Any, threads: int = 1) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        name = "run" if hasattr(worker._decoder, "run") else "forward"
        run_layers, lock, calls = getattr(worker._decoder, name), threading.Lock(), Counter[int]()

        def gated(*args: Any, **named: Any) -> Any:
            with lock:
                calls[threading.get_ident()] += 1
                held = calls.total() > 6
                if held and len(calls) == threads:
                    self.reached.set()
            assert not held or self.opened.wait(20)
            return run_layers(*args, **named)

        monkeypatch.setattr(worker._decoder, name, gated)

    async def held(self) -> None:
        while not self.reached.is_set():
            await asyncio.sleep(0.001)


async def abort(worker: Worker, ids: list[str]) -> None:
    async for _ in worker.abort(ids):
        pass


def test_an_aborted_request_ends_early_and_the_others_do_not(
    own_worker: Worker, requests_of: Any, monkeypatch: Any
) -> None:
    requests = requests_of(6, max_tokens=30)
    (expected,) = run(ask(own_worker, requests))
    gate = Gate(own_worker, monkeypatch)

    async def aborting() -> list[Any]:
        task = asyncio.create_task(ask(own_worker, requests))
        await gate.held()
        waiting = asyncio.create_task(ask(own_worker, [evolve(requests[0], id="waits")]))
        await asyncio.sleep(0.01)
        await abort(own_worker, ["r2", "waits"])
        gate.opened.set()
        return [await task, await waiting]

    ((outcomes,), ((waiting,),)) = run(aborting())
    assert (waiting.stop, len(waiting.tokens), waiting.versions) == ("abort", 0, ())
    for ended, whole in zip(outcomes, expected, strict=True):
        if ended.id == "r2":
            assert ended.stop == "abort"
            assert 0 < len(ended.tokens) < 10
            assert ended.tokens.tolist() == whole.tokens[: len(ended.tokens)].tolist()
        else:
            assert ended.tokens.tolist() == whole.tokens.tolist()


def test_closing_a_message_gives_its_requests_up(own_worker: Worker, requests_of: Any, monkeypatch: Any) -> None:
    gate = Gate(own_worker, monkeypatch)

    async def closing() -> list[Any]:
        task = asyncio.create_task(ask(own_worker, requests_of(4, max_tokens=200)))
        await gate.held()
        task.cancel()
        await asyncio.wait([task])
        gate.opened.set()
        return await ask(own_worker, requests_of(2, seed=1, max_tokens=5))

    (served,) = run(closing())
    assert [len(c.tokens) for c in served] == [5, 5]


def sync(worker: Worker, folder: Path, version: int, leave_out: int = 0, factor: float = 1.5) -> TransferSpec:
    """Send scaled weights; give the spec to receive them by."""
    spec = TransferSpec("disk", str(folder), f"session-{version}", version, timeout_seconds=5.0)
    send(spec, [(name, factor * p) for name, p in worker._model.named_parameters()][leave_out:])
    return spec


async def during(
    worker: Worker, gate: Gate, requests: list[Request], later: list[Request], spec: TransferSpec, how: Any
) -> Any:
    """Hand weights over while requests run and others wait; whether that was over before the gate was opened."""
    running = asyncio.create_task(ask(worker, requests))
    await gate.held()
    waiting = asyncio.create_task(ask(worker, later))
    taking = asyncio.create_task(worker.receive_weights(spec, spec.version, how))
    await asyncio.sleep(0.05)
    assert not taking.done(), "the batch is held in the middle of a token"
    gate.opened.set()
    await taking
    return (await running)[0], (await waiting)[0]


def test_drained_a_batch_ends_with_the_old_weights(
    own_worker: Worker, requests_of: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    (expected,) = run(ask(own_worker, requests_of(4, max_tokens=20)))
    gate, spec = Gate(own_worker, monkeypatch), sync(own_worker, tmp_path, 5)
    before, after = run(during(own_worker, gate, requests_of(4, max_tokens=20), requests_of(3, seed=1), spec, "drain"))
    assert {c.versions for c in before} == {((0, 0),)}
    assert [c.tokens.tolist() for c in before] == [c.tokens.tolist() for c in expected]
    assert {c.versions for c in after} == {((0, 5),)}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_kept_a_batch_goes_on_with_the_new_weights_at_its_next_token(
    tiny_model_folder: Path, requests_of: Any, monkeypatch: Any, tmp_path: Path, threads: int, fused: bool
) -> None:
    set_threads = torch.get_num_threads()
    worker = make_worker(tiny_model_folder, threads=threads, fused=fused)
    try:
        requests = requests_of(40, max_tokens=20)
        (expected,) = run(ask(worker, requests))
        gate, spec = Gate(worker, monkeypatch, threads), sync(worker, tmp_path, 5, factor=-1.0)
        kept, after = run(during(worker, gate, requests, requests_of(3, seed=1), spec, "continue"))
    finally:
        worker.close()
        torch.set_num_threads(set_threads)
    assert {c.versions for c in after} == {((0, 5),)}
    changed = 0
    for completion, whole in zip(kept, expected, strict=True):
        (first, before), (switch, now) = completion.versions
        assert (first, before, now) == (0, 0, 5)
        assert 0 < switch < 20
        assert completion.tokens[:switch].tolist() == whole.tokens[:switch].tolist()
        np.testing.assert_allclose(completion.logprobs[:switch], whole.logprobs[:switch], atol=1e-5)
        changed += completion.tokens.tolist() != whole.tokens.tolist()
        assert np.isfinite(completion.logprobs).all()
    assert changed > 20, "other weights draw other tokens"


def test_the_same_weights_between_two_tokens_change_nothing(
    own_worker: Worker, requests_of: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    requests = requests_of(6, max_tokens=20)
    (expected,) = run(ask(own_worker, requests))
    gate, spec = Gate(own_worker, monkeypatch), sync(own_worker, tmp_path, 1, factor=1.0)
    kept, _ = run(during(own_worker, gate, requests, requests_of(1), spec, "continue"))
    for completion, whole in zip(kept, expected, strict=True):
        assert len(completion.versions) == 2
        assert np.array_equal(completion.tokens, whole.tokens)
        assert np.array_equal(completion.logprobs, whole.logprobs)


def test_aborted_a_batch_comes_back_with_what_it_has(
    own_worker: Worker, requests_of: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    (expected,) = run(ask(own_worker, requests_of(4, max_tokens=30)))
    gate, spec = Gate(own_worker, monkeypatch), sync(own_worker, tmp_path, 5)
    aborted, after = run(during(own_worker, gate, requests_of(4, max_tokens=30), requests_of(3, seed=1), spec, "abort"))
    for completion, whole in zip(aborted, expected, strict=True):
        assert (completion.stop, completion.versions) == ("abort", ((0, 0),))
        assert 0 < len(completion.tokens) < 10
        assert completion.tokens.tolist() == whole.tokens[: len(completion.tokens)].tolist()
    assert {c.versions for c in after} == {((0, 5),)}
    assert {c.stop for c in after} <= {"stop", "length"}


@pytest.mark.parametrize("how", ["drain", "continue", "abort"])
def test_where_nothing_runs_weights_are_taken_at_once(
    own_worker: Worker, tmp_path: Path, requests_of: Any, how: Any
) -> None:
    run(own_worker.receive_weights(sync(own_worker, tmp_path, 3), 3, how))
    (outcomes,) = run(ask(own_worker, requests_of(2)))
    assert {c.versions for c in outcomes} == {((0, 3),)}
    assert {c.stop for c in outcomes} <= {"stop", "length"}


def test_a_weight_sync_that_fails_between_two_tokens_ends_the_batch_with_its_reason(
    own_worker: Worker, requests_of: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    gate, spec = Gate(own_worker, monkeypatch), sync(own_worker, tmp_path, 5, leave_out=1)

    async def failing() -> None:
        running = asyncio.create_task(ask(own_worker, requests_of(4, max_tokens=20)))
        await gate.held()
        taking = asyncio.create_task(own_worker.receive_weights(spec, 5, "continue"))
        await asyncio.sleep(0.01)
        gate.opened.set()
        with pytest.raises(WeightSyncError, match="1 parameters were not sent"):
            await taking
        with pytest.raises(WeightSyncError, match="the last weight sync failed: 1 parameters were not sent"):
            await running

    run(failing())


def test_after_a_refused_weight_sync_nothing_is_generated_until_a_whole_one(
    own_worker: Worker, requests_of: Any, tmp_path: Path
) -> None:
    with pytest.raises(WeightSyncError, match="1 parameters were not sent"):
        run(own_worker.receive_weights(sync(own_worker, tmp_path, 2, leave_out=1), 2, "drain"))
    with pytest.raises(WeightSyncError, match="the last weight sync failed: 1 parameters were not sent"):
        run(ask(own_worker, requests_of(2)))
    run(own_worker.receive_weights(sync(own_worker, tmp_path, 3, factor=1.0), 3, "drain"))
    (outcomes,) = run(ask(own_worker, requests_of(2)))
    assert {c.versions for c in outcomes} == {((0, 3),)}


def test_logits_that_are_not_finite_are_an_error(own_worker: Worker, requests_of: Any) -> None:
    own_worker._model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(Exception, match=r"not finite.*grad_norm"):
        run(ask(own_worker, requests_of(2)))


def test_threads_that_decode_parts_of_a_batch_change_nothing(
    tiny_model_folder: Path, worker: Worker, requests_of: Any
) -> None:
    threads = torch.get_num_threads()
    two = make_worker(tiny_model_folder, threads=2)
    try:
        assert torch.get_num_threads() == 2
        assert set(two._lanes.map(lambda _: torch.get_num_threads(), range(8))) == {1}  # type: ignore[union-attr]
        requests = requests_of(50)
        (one_thread,), (two_threads,) = run(ask(worker, requests)), run(ask(two, requests))
        for one, other in zip(one_thread, two_threads, strict=True):
            assert one.id == other.id
            assert np.array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    finally:
        two.close()
        torch.set_num_threads(threads)


def test_parts_of_a_batch_are_of_equal_size_and_not_too_small() -> None:
    jobs = [Job(Request(str(i), np.arange(3), Sampling(), 0), 8) for i in range(100)]
    assert [len(part) for part in split(jobs, 3)] == [33, 33, 34]
    assert [len(part) for part in split(jobs[:40], 8)] == [20, 20]
    assert [len(part) for part in split(jobs[:5], 8)] == [5]


def test_asleep_it_keeps_neither_cache_nor_weights(worker: Worker, requests_of: Any) -> None:
    run(ask(worker, requests_of(4)))
    cache = sum(buffer.nbytes for buffer in worker._decoder._buffers.values())  # type: ignore[attr-defined]
    weights = sum(p.nbytes for p in worker._model.parameters())
    given = worker.sleep()
    assert not worker._decoder._buffers  # type: ignore[attr-defined]
    assert cache < given <= cache + weights
    fused = worker._decoder.layers[0].gate_up.weights[0]  # type: ignore[attr-defined]
    assert (fused == 0).float().mean() > 0.5, "its pages were given back, and are read as zeros"
    worker.wake()
    assert fused.all()
    run(ask(worker, requests_of(4)))


def send_adapter(worker: Worker, folder: Path, version: int, factor: float = 1.0) -> TransferSpec:
    """Send an adapter of every projection of queries; give the spec to receive it by."""
    draw, tensors = torch.Generator().manual_seed(0), []
    for name, weight in worker._model.named_parameters():
        if name.endswith("q_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            tensors.append((f"{module}.lora_A.weight", torch.randn(2, columns, generator=draw)))
            tensors.append((f"{module}.lora_B.weight", factor * torch.randn(rows, 2, generator=draw)))
    info = AdapterInfo(2, 4.0, rslora=False, kinds=("linear",))
    spec = TransferSpec("disk", str(folder), f"session-{version}", version, timeout_seconds=5.0, adapter=info)
    send(spec, tensors)
    return spec


def test_an_adapter_that_comes_in_sleep_is_applied_when_the_weights_are_back(
    tiny_model_folder: Path, requests_of: Any, tmp_path: Path
) -> None:
    answers = []
    for name, asleep in (("awake", False), ("asleep", True)):
        worker = make_worker(tiny_model_folder)
        for version, factor in ((1, -3.0), (2, 1.0)):  # the second is added to the base, not to the first
            if asleep:
                worker.sleep()
            run(worker.receive_weights(send_adapter(worker, tmp_path / name, version, factor), version, "drain"))
            assert worker._held.asleep == asleep, "the weights of a base are not taken back for an adapter"
        if asleep:
            worker.sleep()
            worker.wake()
        (answer,) = run(ask(worker, requests_of(4, max_tokens=8)))
        answers.append([(one.tokens.tolist(), one.logprobs.tolist(), one.versions) for one in answer])
        worker.close()
    assert answers[0] == answers[1]
    assert {versions for _, _, versions in answers[0]} == {((0, 2),)}
    plain = make_worker(tiny_model_folder)
    (without,) = run(ask(plain, requests_of(4, max_tokens=8)))
    assert [one.logprobs.tolist() for one in without] != [logprobs for _, logprobs, _ in answers[0]]
    plain.close()


def test_half_an_adapter_is_refused_in_sleep_too(own_worker: Worker, tmp_path: Path) -> None:
    spec = send_adapter(own_worker, tmp_path, 1)
    send(spec, [("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(2, 64))])
    own_worker.sleep()
    with pytest.raises(WeightSyncError, match="only one of the two matrices"):
        run(own_worker.receive_weights(spec, 1, "drain"))


def test_a_part_that_fails_leaves_no_other_running(
    tiny_model_folder: Path, requests_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, ended = torch.get_num_threads(), []
    two = make_worker(tiny_model_folder, threads=2)

    def lane(jobs: Any, number: int) -> Any:
        if not number:
            raise ValueError("broken")
        time.sleep(0.3)
        ended.append(number)

    monkeypatch.setattr(two, "_decode_lane", lane)
    try:
        with pytest.raises(Exception, match="broken"):
            run(ask(two, requests_of(50)))
        assert ended == [1]
    finally:
        two.close()
        torch.set_num_threads(threads)
