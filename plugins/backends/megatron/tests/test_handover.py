"""Weights to generators and to exports: from the ranks that own them, whole, bitwise, and never all on one rank."""

import json
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from whet.interfaces.weights import TransferSpec
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig
from whet_megatron.parallel import Grid, ParallelConfig
from whet_testing.role_context import make_context
from whet_testing.stored_weights import assert_bitwise, weights_of
from whet_training.lora_config import LoraConfig, adapter_info
from whet_weights import transfer
from whet_weights.driver import Streams

LAYOUTS = [
    ("qwen3", 1, {}),
    ("llama", 2, {"tensor": 2}),
    ("llama", 2, {"pipeline": 2}),
    ("qwen3", 2, {"tensor": 2, "sequence": True}),
    ("qwen3", 2, {"pipeline": 2, "virtual": 2}),
    ("qwen2", 2, {"context": 2}),
    ("qwen3_moe", 2, {"expert": 2}),
    ("mixtral", 2, {"tensor": 2, "sequence": True, "expert": 2}),
    ("qwen3_moe", 2, {"tensor": 2, "sequence": True, "expert_tensor": 2}),
    ("qwen3", 4, {"tensor": 2, "pipeline": 2}),
    ("mixtral", 4, {"pipeline": 2, "expert": 2}),
    ("qwen3_moe", 4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}),
    ("mixtral", 4, {"tensor": 2, "sequence": True, "context": 2, "expert": 2}),
]


def received(backend, spec):
    """Return what a weight sync brings."""
    pending = backend.send_weights(spec)
    pairs = [(name, tensor.clone()) for name, tensor in transfer.receive(spec)]
    pending.result()
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "sizes"), LAYOUTS, ids=str)
def test_sent_and_exported_weights_are_bitwise_those_of_the_folder(build, folders, tmp_path, name, ranks, sizes):
    """Row parallel weights are split by columns: the part of a rank is not contiguous in the stored weight."""
    folder = folders(name, layers=4) if "virtual" in sizes else folders(name)
    backend, senders = build(folder, ranks, sizes), ParallelConfig(**sizes).senders
    expected = weights_of(folder)
    spec = TransferSpec("shared-memory", str(tmp_path / "sent"), "s", 1, "", senders, timeout_seconds=60.0)
    assert_bitwise(received(backend, spec), expected)
    parts = [json.loads(file.read_text())["entries"] for file in sorted((tmp_path / "sent").glob("manifest-*"))]
    assert len(parts) == senders
    assert all(parts)
    backend.export(tmp_path / "out")
    assert_bitwise(weights_of(tmp_path / "out"), expected)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == senders


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "sizes"), [LAYOUTS[2], LAYOUTS[7], LAYOUTS[10]], ids=str)
def test_ranks_that_own_different_weights_broadcast_one_after_another(build, folders, tmp_path, name, ranks, sizes):
    """Receivers read senders in order, and senders gather in step: in another order they would wait for each other."""
    backend = build(name, ranks, sizes)
    plain = TransferSpec(
        "broadcast", "", uuid.uuid4().hex, 1, "bfloat16", ParallelConfig(**sizes).senders, 1, timeout_seconds=60.0
    )
    driver = Streams(plain, lambda: "127.0.0.1", lambda *order: {})
    try:
        assert_bitwise(received(backend, driver.spec), weights_of(folders(name)), torch.bfloat16)
    finally:
        driver.close()


class OtherGroup:
    """Spawns workers of a file beside this one."""

    def __init__(self, whole, worker):
        self._whole, self._worker = whole, worker

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def spawn(self, target, arguments):
        return self._whole.spawn(f"file:{Path(__file__).parent / self._worker}", arguments)


@contextmanager
def built(place, folder, tmp_path, worker, config):
    """Build a backend of other workers, and close it."""
    context = make_context(tmp_path / "role", "backend", folder, place)
    object.__setattr__(context, "worker_group", OtherGroup(place, worker))
    backend = MegatronBackend(config, context)
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "lora"), [("tensor", None), ("pipeline", LoraConfig(rank=4))], ids=["weights", "adapter"]
)
def test_weights_that_do_not_lie_one_number_after_another_are_sent_right(place, folders, tmp_path, axis, lora):
    """Gloo adds up and broadcasts the memory of a tensor as it lies, whatever its strides."""
    config, folder = MegatronConfig(parallel=ParallelConfig(**{axis: 2}), lora=lora), folders("llama")
    info = None if lora is None else adapter_info(lora)
    specs = [TransferSpec("shared-memory", str(tmp_path / name), name, 1, adapter=info) for name in ("before", "after")]
    with built(place(2), folder, tmp_path, "strided.py:Strided", config) as backend:
        before = received(backend, specs[0])
        backend._workers.call("stride")
        assert_bitwise(received(backend, specs[1]), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "share"),
    [
        ("llama", {"pipeline": 2}, 0.6),
        ("llama", {"tensor": 2}, 0.6),
        ("qwen3_moe", {"expert": 2}, 0.9),
        ("llama", {"tensor": 2, "pipeline": 2}, 0.4),
    ],
    ids=str,
)
def test_no_rank_holds_more_than_its_part_and_one_bucket(place, folders, tmp_path, name, sizes, share):
    """A bucket here: the gathered parts of one parameter, and the stored weights that are made of them."""
    ranks = 4 if len(sizes) == 2 else 2
    folder = folders(name, layers=4)
    config = MegatronConfig(parallel=ParallelConfig(**sizes))
    with built(place(ranks), folder, tmp_path, "measured.py:Measured", config) as backend:
        found = backend._workers.call("measure", phase="weight_sync")
    expected = weights_of(folder)
    whole = sum(tensor.nbytes for tensor in expected.values())
    assert sorted(name for one in found for name in one["names"]) == sorted(expected)
    for one in found:
        assert one["held"] < share * whole
        assert one["peak"] <= one["held"] + 2 * one["largest"]


def test_every_rank_that_sends_is_numbered_once_in_the_order_of_stages():
    sizes = ParallelConfig(tensor=2, pipeline=2, expert=4)
    grid = Grid(16, sizes)
    numbers = {rank: grid.sender(rank) for rank in range(16)}
    senders = {number: rank for rank, number in numbers.items() if number is not None}
    assert sorted(senders) == list(range(sizes.senders))
    assert [senders[n] for n in range(8)] == [grid.source(stage, expert) for stage in (0, 1) for expert in range(4)]
