"""State of the optimizer in host memory: away between steps, and the same numbers, bit for bit."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from whet.component import Spec
from whet_fsdp2 import host_state
from whet_fsdp2.host_state import buckets

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    """Several buckets for a small model."""
    monkeypatch.setattr(host_state.buckets, "__defaults__", (20_000,))


def stored(worker):
    """Return the bytes of masters and moments that are in place."""
    masters = [local for name, local in worker._weights.masters.items() if name in worker._stepper.masters_away]
    return sum(tensor.untyped_storage().nbytes() for tensor in (*masters, *worker._stepper.held()))


def results(worker, batches):
    found = [worker.train(batch, LIKELIHOOD) for batch in batches]
    return np.array([[one[name].number() for name in ("loss", "grad_norm")] for one in found])


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("bfloat16", {"micro_batch_tokens": 40}),
        ("bfloat16", {"optimizer": {"lr": 1e-2, "kind": "muon"}}),
        ("bfloat16", {"lora": {"rank": 4}}),
        pytest.param(
            "bfloat16",
            {"optimizer": {"lr": 1e-2, "kind": "adamw_8bit"}},
            marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
        ),
    ],
)
def test_steps_are_bitwise_those_without_and_nothing_stays(make_worker, make_batch, tmp_path, dtype, options):
    batches = [make_batch(seed) for seed in range(5)]
    plain, away = (make_worker("llama", dtype, offload_optimizer=offload, **options) for offload in (False, True))
    assert len(away._stepper._buckets) > 1
    assert np.array_equal(results(away, batches[:2]), results(plain, batches[:2]))
    assert stored(plain) > 0
    assert stored(away) == 0
    outputs = [worker.score(batches[0], ("logprobs",))["logprobs"] for worker in (away, plain)]
    assert np.array_equal(*outputs)
    # A checkpoint of either goes on as the other.
    for name, worker in (("away", away), ("plain", plain)):
        worker.save(str(tmp_path / name))
    later = {name: results(worker, batches[2:]) for name, worker in (("plain", plain), ("away", away))}
    assert np.array_equal(later["plain"], later["away"])
    for saved, offload in (("away", False), ("plain", True)):
        other = make_worker("llama", dtype, offload_optimizer=offload, **options)
        other.load(str(tmp_path / saved))
        assert stored(other) == 0 or not offload
        assert np.array_equal(results(other, batches[2:]), later["plain"])


def test_a_copy_that_is_written_in_the_background_is_of_that_moment(make_worker, make_batch, tmp_path):
    import asyncio

    batches = [make_batch(seed) for seed in range(4)]
    worker = make_worker("llama", "bfloat16", offload_optimizer=True)
    results(worker, batches[:2])
    written = sum(part.nbytes for _, part in worker._stepper.parts(0))
    assert worker._stepper.bytes_of_parts(0) == written
    worker.take(str(tmp_path))
    expected = results(worker, batches[2:])
    asyncio.run(worker.written())
    worker.load(str(tmp_path))
    assert np.array_equal(results(worker, batches[2:]), expected)


def test_state_that_is_away_sleeps_and_wakes_with_the_rest(make_worker, make_batch):
    plain, away = (make_worker("llama", "bfloat16", offload_optimizer=offload) for offload in (False, True))
    for worker in (plain, away):
        results(worker, [make_batch(0)])
        worker.sleep()
        worker.wake()
    assert np.array_equal(results(away, [make_batch(1)]), results(plain, [make_batch(1)]))


def test_weights_fill_buckets_in_order_and_a_large_one_has_its_own():
    made = buckets([("a", 10), ("b", 20), ("c", 99), ("d", 5), ("e", 25), ("f", 1)], lambda names: (), 30)
    assert [one.names for one in made] == [("a", "b"), ("c",), ("d", "e"), ("f",)]


def test_a_bucket_frees_memory_and_gives_it_back():
    tensors = {"a": torch.arange(1000.0), "b": torch.arange(7, dtype=torch.uint8)}
    (one,) = buckets([("a", 1), ("b", 1)], lambda names: (tensors[name] for name in names))
    assert {tensor.untyped_storage().nbytes() for tensor in tensors.values()} == {0}
    with one.here():
        tensors["a"] += 1
        tensors["c"] = torch.ones(3)
    with one.here():
        assert torch.equal(tensors["a"], torch.arange(1000.0) + 1)
        assert torch.equal(tensors["b"], torch.arange(7, dtype=torch.uint8))
