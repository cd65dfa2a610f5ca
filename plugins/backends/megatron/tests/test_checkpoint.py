"""Checkpoints: resumed in the same layout and in others, refused where they are damaged."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from whet.errors import WhetError
from whet.run import checkpoint as run_checkpoint
from whet.run.run_folder import RunFolder
from whet.runtime.local import LocalCluster
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig, OptimizerConfig
from whet_testing.role_context import make_context
from whet_testing.stored_weights import assert_bitwise, weights_of
from whet_testing.three_steps import steps_of
from whet_training.weight_groups import WeightGroup

CONTINUATIONS = [
    ("qwen3", "float32", (2, {"tensor": 2}), (2, {"pipeline": 2})),
    ("qwen3", "float32", (1, {}), (2, {"tensor": 2, "sequence": True})),
    ("llama", "float32", (2, {}), (2, {"tensor": 2})),
    ("llama", "float32", (2, {"pipeline": 2}), (1, {})),
    ("qwen3_moe", "float32", (2, {"expert": 2}), (2, {})),
    ("mixtral", "float32", (1, {}), (2, {"expert": 2})),
    ("qwen3_moe", "float32", (4, {"pipeline": 2, "expert": 2}), (2, {"tensor": 2, "sequence": True, "expert": 2})),
    ("llama", "bfloat16", (2, {"tensor": 2}), (2, {"pipeline": 2})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "saving", "loading"), CONTINUATIONS, ids=str)
def test_a_checkpoint_goes_on_bitwise_in_its_layout_and_to_rounding_in_another(
    build, make_batch, tmp_path, name, dtype, saving, loading
):
    """In bfloat16 the passes of other layouts round otherwise; the weights themselves are the same bits."""
    later = [make_batch(seed) for seed in (2, 3, 4)]
    first = build(name, *saving, dtype)
    steps_of(first, [make_batch(0), make_batch(1)])
    pending = first.save_in_background(tmp_path / "saved")
    pending.taken()
    first.export(tmp_path / "expected")
    expected = steps_of(first, later)
    pending.result()
    first.close()
    for where in (saving, loading):
        other = build(name, *where, dtype)
        other.load(tmp_path / "saved")
        other.export(tmp_path / f"found-{len(list(tmp_path.iterdir()))}")
        found = steps_of(other, later)
        other.close()
        if where == saving:
            assert np.array_equal(found, expected)
        np.testing.assert_allclose(found, expected, rtol=1e-6 if dtype == "float32" else 1e-2)
    for folder in tmp_path.glob("found-*"):
        assert_bitwise(weights_of(folder), weights_of(tmp_path / "expected"))


class DyingGroup:
    """Spawns workers that die while they save."""

    def __init__(self, whole):
        self._whole = whole

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def spawn(self, target, arguments):
        return self._whole.spawn(f"file:{Path(__file__).parent / 'dying.py'}:Dying", arguments)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["file", "index"])
def test_a_save_that_is_killed_leaves_the_one_before_in_force(build, folders, make_batch, tmp_path, moment):
    run = RunFolder(tmp_path / "run")
    later = [make_batch(seed) for seed in (1, 2)]
    with LocalCluster(tmp_path / "logs") as cluster:
        context = make_context(tmp_path / "role", "backend", folders("qwen3"), cluster.worker_group("backend", 1))
        object.__setattr__(context, "worker_group", DyingGroup(context.worker_group))
        backend = MegatronBackend(MegatronConfig(optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1)), context)
        steps_of(backend, [make_batch(0)])
        save(run, 1, backend)
        expected = steps_of(backend, later)
        backend._workers.call("die_in", moment, phase="save")
        with pytest.raises(WhetError):
            save(run, 3, backend)
        backend.close()
    saved = run_checkpoint.latest(run)
    assert saved.step == 1
    again = build("qwen3")
    again.load(saved.part("backend"))
    assert np.array_equal(steps_of(again, later), expected)


def save(run, step, backend):
    """Save as a run does."""

    def begin(folder):
        pending = backend.save_in_background(folder)
        pending.taken()
        return pending.result

    run_checkpoint.begin(run, step, {}, {"backend": begin})()


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
def test_a_step_beside_a_save_does_not_change_what_is_saved(
    build, folders, make_batch, tmp_path, monkeypatch, distributed
):
    """The matrices are above 1 MiB, and Megatron copies no parameter that has memory of its own."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as Writer

    write, stepped = Writer.write_preloaded_data, threading.Event()

    def later(*args, **options):
        stepped.wait()
        return write(*args, **options)

    folder, optimizer = folders("llama", mlp=8192), OptimizerConfig(lr=1e-2, distributed=distributed)
    backend = build(folder, dtype="bfloat16", optimizer=optimizer)
    steps_of(backend, [make_batch(0)])
    monkeypatch.setattr(Writer, "write_preloaded_data", staticmethod(later))
    pending = backend.save_in_background(tmp_path / "saved")
    pending.taken()
    backend.export(tmp_path / "expected")
    steps_of(backend, [make_batch(1)])
    stepped.set()
    pending.result()
    backend.close()
    monkeypatch.undo()
    other = build(folder, dtype="bfloat16", optimizer=optimizer)
    other.load(tmp_path / "saved")
    other.export(tmp_path / "found")
    assert_bitwise(weights_of(tmp_path / "found"), weights_of(tmp_path / "expected"))


def test_weights_with_rates_of_their_own_keep_them_after_a_resume(build, make_batch, tmp_path):
    groups = (WeightGroup("embed_tokens", lr_factor=0.1), WeightGroup("o_proj", weight_decay=0.5))
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, groups=groups)
    first, again = build(optimizer=optimizer), build(optimizer=optimizer)
    steps_of(first, [make_batch(0)])
    first.save(tmp_path / "saved").result()
    again.load(tmp_path / "saved")
    later = [make_batch(1), make_batch(2)]
    expected = steps_of(first, later)
    assert np.array_equal(steps_of(again, later), expected)
    assert not np.array_equal(
        steps_of(build(optimizer=OptimizerConfig(lr=1e-2)), [make_batch(0), *later])[1:], expected
    )


@pytest.fixture
def saved(build, make_batch, tmp_path):
    backend = build("qwen3")
    steps_of(backend, [make_batch(0)])
    backend.save(tmp_path / "saved").result()
    return tmp_path / "saved"


def damaged(saved, how):
    index = saved / "backend.json"
    if how == "cut":
        file = max((saved / "megatron").glob("*.distcp"), key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[:-2000])
    elif how == "no tensors":
        shutil.rmtree(saved / "megatron")
    else:
        document = json.loads(index.read_text())
        index.write_text(json.dumps({**document, **how}))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no tensors", "cannot be loaded"),
        ("cut", "cannot be loaded"),
        ({"backend": "fsdp2"}, "is a checkpoint of the backend fsdp2"),
        ({"format": 99}, "has format 99"),
        ({"optimizer_steps": -1}, "optimizer_steps -1"),
        ({"value": True}, "is of another model: value is True"),
        ({"distributed": False}, "was saved with optimizer.distributed: false, and does not load with true"),
    ],
    ids=str,
)
def test_a_damaged_or_foreign_checkpoint_is_refused_and_changes_nothing(build, make_batch, saved, how, words):
    backend, batch = build("qwen3"), make_batch(0)
    before = backend.score(batch, ("logprobs",))["logprobs"]
    damaged(saved, how)
    with pytest.raises(WhetError, match=words):
        backend.load(saved)
    assert np.array_equal(backend.score(batch, ("logprobs",))["logprobs"], before)
