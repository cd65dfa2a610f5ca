"""AdamW with moments of 8 bits: near AdamW, bitwise after a checkpoint, and to rounding in another layout."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

from whet.component import Spec
from whet.errors import ConfigError
from whet_fsdp2 import eight_bit

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")
EIGHT_BIT = {"kind": "adamw_8bit", "lr": 3e-3}
installed = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the package bitsandbytes is not installed"
)


def losses(worker, batches):
    return np.array([worker.train(batch, LIKELIHOOD)["loss"].number() for batch in batches])


def state(numbers=700):
    """Return a state as bitsandbytes has it, with a table of 256 codes that are dense near 0."""
    coarse = torch.linspace(0.01, 1, 65)
    table = torch.cat([-coarse.flip(0)[1:], torch.linspace(-0.009, 0.009, 127), coarse])
    draw, found = torch.Generator().manual_seed(0), {"step": 0}
    for n, one in (("1", table), ("2", table.abs().sort().values)):
        codes = torch.randint(256, (7, numbers // 7), generator=draw, dtype=torch.uint8)
        found |= {f"state{n}": codes, f"absmax{n}": torch.rand(-(-numbers // 256), generator=draw), f"qmap{n}": one}
    return found


def test_moments_with_their_scales_are_every_code_again():
    known, empty = state(), state()
    for name in ("state1", "state2", "absmax1", "absmax2"):
        empty[name] = torch.zeros_like(empty[name])
    eight_bit.fill(empty, 5, eight_bit.moments(known), eight_bit.scales(known))
    assert empty["step"] == 5
    assert all(torch.equal(empty[name], known[name]) for name in ("state1", "absmax1", "absmax2"))
    for name, moment in eight_bit.moments(known).items():  # two codes of this table may be one number
        assert torch.equal(eight_bit.moments(empty)[name], moment)


def test_moments_without_scales_are_rounded_to_the_nearest_code_of_a_block():
    made = state()
    wanted = {"exp_avg": torch.linspace(-3, 2, 700).view(7, 100), "exp_avg_sq": torch.linspace(0, 1, 700).view(7, 100)}
    eight_bit.fill(made, 1, wanted, {})
    for name, n in (("exp_avg", "1"), ("exp_avg_sq", "2")):
        numbers, table = wanted[name].reshape(-1).double().numpy(), made[f"qmap{n}"].double().numpy()
        for block in range(3):
            part = numbers[256 * block : 256 * block + 256]
            scale = np.abs(part).max()
            best = np.abs(part[:, None] / scale - table).min(1) * scale
            found = eight_bit.moments(made)[name].reshape(-1).double().numpy()[256 * block : 256 * block + 256]
            np.testing.assert_allclose(np.abs(found - part), best, atol=1e-6)


def test_a_missing_package_is_named(make_worker, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"backend\.optimizer\.kind: is adamw_8bit, .* pip install bitsandbytes"):
        make_worker(optimizer=EIGHT_BIT)


@installed
def test_a_small_model_learns_as_with_adamw(make_worker, make_batch):
    batches = [make_batch(seed % 4) for seed in range(40)]
    plain, ours = (losses(make_worker("llama", optimizer={**EIGHT_BIT, "kind": kind}), batches)
                   for kind in ("adamw", "adamw_8bit"))  # fmt: skip
    assert plain[-4:].mean() < 0.5 * plain[:4].mean()
    assert ours[-4:].mean() == pytest.approx(plain[-4:].mean(), rel=0.05)
    assert not np.array_equal(ours, plain)


@installed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_on_bitwise(make_worker, make_batch, tmp_path, dtype):
    batches = [make_batch(seed) for seed in range(4)]
    first, second = (make_worker("llama", dtype, optimizer=EIGHT_BIT) for _ in range(2))
    losses(first, batches[:2])
    first.save(str(tmp_path))
    second.load(str(tmp_path))
    assert np.array_equal(losses(first, batches[2:]), losses(second, batches[2:]))


@installed
def test_adamw_goes_on_from_8_bits_and_8_bits_from_adamw(make_worker, make_batch, tmp_path):
    batches = [make_batch(seed) for seed in range(4)]
    for kind, other in (("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")):
        first = make_worker("llama", optimizer={**EIGHT_BIT, "kind": kind})
        losses(first, batches[:2])
        first.save(str(tmp_path / kind))
        second = make_worker("llama", optimizer={**EIGHT_BIT, "kind": other})
        second.load(str(tmp_path / kind))
        np.testing.assert_allclose(losses(second, batches[2:]), losses(first, batches[2:]), rtol=1e-3)


@installed
def test_moments_take_a_quarter_of_the_memory(make_worker, batch):
    held = {}
    for kind in ("adamw", "adamw_8bit"):
        worker = make_worker("llama", optimizer={"kind": kind})
        worker.train(batch, LIKELIHOOD)
        held[kind] = sum(tensor.nbytes for tensor in worker._stepper.held())
    assert held["adamw_8bit"] < 0.28 * held["adamw"]
