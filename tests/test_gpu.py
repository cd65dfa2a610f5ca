"""The work of `benchmarks/gpu.py`: on a GPU at the shapes of real models, and on any machine at a toy size."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_gpu", FILE)
    module = sys.modules["benchmark_gpu"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = [
    pytest.param(name, kind, device, id=f"{name} {kind}", marks=[pytest.mark.gpu, pytest.mark.timeout(300)] * large)
    for name, kind, device, large in (
        ("toy", "sft", "cpu", False),
        ("toy", "grpo", "cpu", False),
        ("toy-moe", "lora", "cpu", False),
        ("1.5b", "sft", "cuda:0", True),
        ("1.5b", "grpo", "cuda:0", True),
        ("8b", "sft", "cuda:0", True),
        ("8b", "grpo", "cuda:0", True),
        ("30b-a3b", "lora", "cuda:0", True),
    )
]


@pytest.mark.parametrize(("name", "kind", "device"), CASES)
def test_a_shape_is_trained_and_sampled(benchmark, name, kind, device):
    if device != "cpu":
        torch.cuda.empty_cache()
        room = torch.cuda.mem_get_info(device)[0] / 2**30
        if room < benchmark.SHAPES[name].least_gib:
            pytest.skip(f"needs {benchmark.SHAPES[name].least_gib} GiB of a GPU, and {room:.0f} are free")
    measure = benchmark.measure if device == "cpu" else benchmark.measure_apart
    found = measure(name, kind, device)
    print("\n" + benchmark.report(name, kind, found))
    assert found["tokens a second"] > 0
    if kind == "sft":  # the plain loop has the same random weights, rounded
        assert found["first loss"] == pytest.approx(found["plain first loss"], rel=5e-3)
    if kind == "lora":
        assert found["GiB of weights of the generator's own"] == 0
        assert found["logprobs after sleep differ by"] == 0
        gap = found["mean gap of logprobs to the generator"]
        assert gap < min(0.05, found["and without the adapter"])
