"""Checkpoints: resumed in the same layout and in others, refused where they are damaged."""

import json
import shutil

import numpy as np
import pytest

from whet.errors import WhetError
from whet_megatron.config import OptimizerConfig
from whet_testing.three_steps import steps_of
from whet_training.weight_groups import WeightGroup

CONTINUATIONS = [
    ("qwen3", (2, {"tensor": 2}), (2, {"pipeline": 2})),
    ("qwen3", (1, {}), (2, {"tensor": 2, "sequence": True})),
    ("llama", (2, {}), (2, {"tensor": 2})),
    ("llama", (2, {"pipeline": 2}), (1, {})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "saving", "loading"), CONTINUATIONS, ids=str)
def test_a_checkpoint_goes_on_bitwise_in_its_layout_and_to_rounding_in_another(
    build, make_batch, tmp_path, name, saving, loading
):
    later = [make_batch(seed) for seed in (2, 3, 4)]
    first = build(name, *saving)
    steps_of(first, [make_batch(0), make_batch(1)])
    first.save(tmp_path / "saved").result()
    expected = steps_of(first, later)
    first.close()
    for where in (saving, loading):
        other = build(name, *where)
        other.load(tmp_path / "saved")
        found = steps_of(other, later)
        other.close()
        if where == saving:
            assert np.array_equal(found, expected)
        np.testing.assert_allclose(found, expected, rtol=2e-6)


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
