"""Adapters of experts: what leaves the backend with them, and runs that go on with another parallelism.

Their steps against PEFT's: test_lora.py.
"""

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from whet_megatron.config import OptimizerConfig
from whet_megatron.parallel import ParallelConfig
from whet_testing.three_steps import steps_of
from whet_training.lora_config import LoraConfig

pytestmark = pytest.mark.slow
LORA = LoraConfig(rank=4, alpha=6.0, experts=True)
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-5)
FEW = {"micro_batch_tokens": 40, "optimizer": OPTIMIZER, "lora": LORA}
"""Several micro-batches on each rank."""
SPLIT = {"tensor": 2, "sequence": True, "expert_tensor": 2}
BOTH = {"tensor": 2, "sequence": True, "expert": 2}
SEEDS = (0, 1, 2)


def tensors_of(folder):
    """Return the tensors of a model folder, or of one with an adapter, by name."""
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def same(found, expected):
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "grouped"),
    [("qwen3_moe", 2, SPLIT, False), ("mixtral", 4, {"pipeline": 2, "expert": 2}, True)],
    ids=str,
)
def test_what_leaves_a_backend_is_the_model_that_it_trained(
    build, folders, make_batch, sent, tmp_path, name, ranks, sizes, grouped
):
    """The merged export, the adapter, and what generators get."""
    backend, batch = build(name, ranks, sizes, grouped_experts=grouped, **FEW), make_batch(0)
    steps_of(backend, [make_batch(seed) for seed in SEEDS])
    ours = backend.score(batch, ("logprobs",))["logprobs"]
    backend.save(tmp_path / "saved").result()
    backend.export(tmp_path / "merged")
    plain = build(tmp_path / "merged")
    np.testing.assert_allclose(plain.score(batch, ("logprobs",))["logprobs"], ours, atol=1e-4)
    assert np.abs(build(name).score(batch, ("logprobs",))["logprobs"] - ours).max() > 0.05
    base, senders = tensors_of(folders(name)), ParallelConfig(**sizes).senders
    merged = sent(backend, senders)
    same(merged, tensors_of(tmp_path / "merged"))
    same(sent(backend, lora=LORA), tensors_of(tmp_path / "saved"))
    same(sent(backend, senders, weights="base"), base)
    adapted = {one for one in base if "_proj" in one or ".experts." in one}
    for tensors in (merged, sent(backend, senders, weights="trial")):
        assert {one for one, tensor in base.items() if not torch.equal(tensors[one], tensor)} == adapted


def test_experts_that_are_split_over_two_axes_are_sent_and_saved_whole(build, make_batch, sent, tmp_path):
    sizes = {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}
    one, several = build("qwen3_moe", **FEW), build("qwen3_moe", 4, sizes, **FEW)
    steps_of(one, [make_batch(0)])
    one.save(tmp_path / "one").result()
    several.load(tmp_path / "one")
    several.save(tmp_path / "several").result()
    same(tensors_of(tmp_path / "several"), tensors_of(tmp_path / "one"))
    for weights in ("policy", "trial"):
        found = sent(several, ParallelConfig(**sizes).senders, weights=weights)
        for name, tensor in sent(one, weights=weights).items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5)
    later = [make_batch(seed) for seed in (1, 2)]
    expected = steps_of(one, later)
    one.load(tmp_path / "several")
    assert np.array_equal(steps_of(one, later), expected)


@pytest.mark.parametrize(
    ("saving", "loading", "distributed"),
    [
        ((4, BOTH, True), (2, SPLIT, False), True),
        ((2, SPLIT, True), (2, {"pipeline": 2}, True), True),
        ((2, {"pipeline": 2}, False), (2, {"expert": 2}, True), False),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_goes_on_bitwise_in_its_layout_and_to_rounding_in_another(
    build, make_batch, tmp_path, saving, loading, distributed
):
    def start(ranks, sizes, grouped):
        optimizer = evolve(OPTIMIZER, distributed=distributed)
        return build("qwen3_moe", ranks, sizes, grouped_experts=grouped, **{**FEW, "optimizer": optimizer})

    first, later = start(*saving), [make_batch(seed) for seed in (2, 3, 4)]
    steps_of(first, [make_batch(0), make_batch(1)])
    first.save(tmp_path / "saved").result()
    expected = steps_of(first, later)
    first.close()
    for where in (saving, loading):
        made = start(*where)
        made.load(tmp_path / "saved")
        found = steps_of(made, later)
        made.close()
        if where == saving:
            assert np.array_equal(found, expected)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
