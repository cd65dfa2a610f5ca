"""What a GPU computes, against a CPU in float32. On a machine without one the same code runs on the CPU."""

import importlib.util

import numpy as np
import pytest
import torch

from whet.component import Spec
from whet_fsdp2 import varlen
from whet_fsdp2.attention import attend_elsewhere
from whet_fsdp2.blocks import AttentionPlan

WEIGHTED = Spec("whet_testing.losses:Weighted")
LIKELIHOOD = Spec("whet_testing.losses:Likelihood")
GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)
OPTIONS = [
    {"layout": "padded"},
    {"layout": "packed"},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": "selective"},
    {"micro_batch_tokens": 40, "offload_optimizer": True},
    {"optimizer": {"lr": 1e-3, "kind": "muon"}},
    {"lora": {"rank": 4}},
]


TOLERANCES = {"float32": (5e-4, 1e-3), "bfloat16": (5e-2, 0.1)}
"""Of logprobs in nats, and of the norm of a gradient's difference relative to the gradient."""


def relative(found, expected):
    return float(((found - expected).norm() / expected.norm().clamp(min=1e-12)).detach())


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scores_and_gradients_are_those_of_a_cpu_in_float32(make_worker, make_batch, gradients, device, dtype, options):
    batch, (nats, near) = make_batch(), TOLERANCES[dtype]
    expected, found = make_worker(), make_worker(dtype=dtype, device=device, **options)
    scores = [worker.score(batch, ("logprobs", "entropy")) for worker in (expected, found)]
    for name in scores[0]:
        np.testing.assert_allclose(scores[1][name], scores[0][name], atol=nats)
    if "lora" in options:
        expected = make_worker(**options)
    theirs, ours = gradients(expected, batch, WEIGHTED), gradients(found, batch, WEIGHTED)
    for name, gradient in theirs.items():
        if gradient.norm() > 0:
            assert relative(ours[name].float().cpu(), gradient) < near, name
    before = found.score(batch, ("logprobs",))["logprobs"]
    assert np.isfinite(found.train(batch, LIKELIHOOD)["loss"].number())
    assert not np.array_equal(found.score(batch, ("logprobs",))["logprobs"], before)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_an_offloaded_optimizer_takes_the_same_steps(make_worker, make_batch, device):
    plain, away = (
        make_worker("llama", "bfloat16", device=device, offload_optimizer=offload) for offload in (False, True)
    )
    for seed in range(3):
        losses = [worker.train(make_batch(seed), LIKELIHOOD)["loss"].number() for worker in (plain, away)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    for worker in (plain, away):
        worker.sleep()
        worker.wake()
    losses = [worker.train(make_batch(3), LIKELIHOOD)["loss"].number() for worker in (plain, away)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_moments_of_8_bits_learn(make_worker, make_batch, device, tmp_path):
    worker = make_worker("llama", device=device, optimizer={"kind": "adamw_8bit", "lr": 3e-3})
    losses = [worker.train(make_batch(seed % 4), LIKELIHOOD)["loss"].number() for seed in range(24)]
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
    worker.save(str(tmp_path))
    after = worker.train(make_batch(0), LIKELIHOOD)["loss"].number()
    worker.load(str(tmp_path))
    assert worker.train(make_batch(0), LIKELIHOOD)["loss"].number() == pytest.approx(after, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [varlen.of_torch, varlen.of_flash_attn])
@pytest.mark.parametrize("window", [None, 1, 37, 5000])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_flash_kernels_compute_prompts_and_windows(make, window, heads):
    kernel, why = make()
    if kernel is None:
        pytest.skip(why)
    lengths, prefix = np.array([300, 1, 130, 77, 5, 129, 64, 1]), np.array([-1, -1, -1, -1, 0, 0, 2, 0])
    plan, draw = AttentionPlan(lengths, prefix), torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(int(lengths.sum()), n, 64, device="cuda", generator=draw) for n in (heads[0], heads[1], heads[1])
    )
    upstream = torch.randn(q.shape, device="cuda", generator=draw)
    results = []
    for dtype, chosen in ((torch.float32, None), (torch.bfloat16, kernel)):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend_elsewhere(*inputs, plan, 0.125, window, chosen)
        results.append([out, *torch.autograd.grad(out, inputs, upstream.to(dtype))])
    # A query that sees one key has no gradient: what both compute then is rounding.
    least = 1e-3 * float(upstream.norm())
    for found, expected in zip(results[1], results[0], strict=True):
        assert float((found.float() - expected).detach().norm()) < 0.02 * max(float(expected.detach().norm()), least)


@pytest.mark.gpu
def test_the_kernel_of_a_gpu_is_named_in_the_log(make_worker, capsys):
    make_worker(dtype="bfloat16", device="cuda:0")
    assert "attention of packed rows: " in capsys.readouterr().out


@pytest.mark.gpu
def test_kernels_of_liger_compute_what_the_model_does(make_worker, make_batch, gradients):
    pytest.importorskip("liger_kernel")
    plain, ours = (make_worker("llama", device="cuda:0", kernels=kernels) for kernels in ((), ("liger",)))
    theirs = gradients(plain, make_batch(), WEIGHTED)
    for name, gradient in gradients(ours, make_batch(), WEIGHTED).items():
        assert relative(gradient, theirs[name]) < 1e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=str)
def test_compiled_layers_compute_what_the_model_does(make_worker, make_batch, gradients, options):
    pytest.importorskip("triton")
    plain, ours = (make_worker("llama", device="cuda:0", compile=one, **options) for one in (False, True))
    theirs = gradients(plain, make_batch(), WEIGHTED)
    for name, gradient in gradients(ours, make_batch(), WEIGHTED).items():
        assert relative(gradient, theirs[name]) < 1e-2, name
