"""Live bytes of tensors without memory, and the peak of a process, against sizes that are known."""

import mmap
import subprocess
import sys

import pytest
import torch

from whet_memory.live_bytes import fake_tensors
from whet_memory.measure import PeakMeter
from whet_memory.timelines import peak

MIB = 2**20


def test_bytes_are_counted_while_a_tensor_lives_and_not_after_it() -> None:
    with fake_tensors() as live:
        with live.phase("made"):
            one = torch.empty(MIB, dtype=torch.float32)
            other = one + 1
            assert live.now == 8 * MIB
            del other
        assert live.now == 4 * MIB
        view = one[10:]
        del one
        assert live.now == 4 * MIB, "a view keeps its storage"
        del view
        assert live.now == 0
    assert peak(live.timelines["made"]) == 8 * MIB


def test_a_model_of_any_size_needs_no_memory_and_its_gradients_are_counted() -> None:
    with fake_tensors() as live:
        layer = torch.nn.Linear(100_000, 100_000, bias=False)
        assert live.now == 4 * 10**10
        with live.phase("train"):
            layer(torch.ones(2, 100_000)).sum().backward()
        assert live.now == pytest.approx(8 * 10**10, rel=1e-3)


def test_storages_that_are_freed_in_place_are_not_counted() -> None:
    with fake_tensors() as live:
        tensor = torch.empty(MIB)
        tensor.untyped_storage().resize_(0)
        assert live.now == 0
        tensor.untyped_storage().resize_(4 * MIB)
        assert live.now == 4 * MIB


def test_a_value_that_code_reads_is_one() -> None:
    with fake_tensors():
        assert float(torch.zeros(3).sum()) == 1.0
        assert bool(torch.zeros(1) > 5) is True


def test_a_meter_finds_the_peak_of_each_phase_and_nothing_of_mapped_files() -> None:
    meter = PeakMeter(torch.device("cpu"), "critic")
    with meter.phase("train"), mmap.mmap(-1, 96 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for page in range(0, 96 * MIB, mmap.PAGESIZE):
            memory[page] = 1
    with meter.phase("optimizer"):
        pass
    found = {name: metric.number() * 1024 for name, metric in meter.metrics().items()}
    assert 90 < found["memory/critic.train"] < 140
    assert found["memory/critic.optimizer"] < found["memory/critic.train"] - 80
    assert meter.metrics() == {}, "what was told is not told again"


@pytest.mark.gpu
def test_a_phase_may_be_the_first_use_of_a_gpu() -> None:
    code = """
import torch
from whet_memory.measure import PeakMeter
meter = PeakMeter(torch.device("cuda:0"), "backend")
with meter.phase("loading"):
    torch.ones(64 << 20, device="cuda:0")
(peak,) = meter.metrics().values()
assert 0.25 <= peak.number() < 0.3, peak
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
