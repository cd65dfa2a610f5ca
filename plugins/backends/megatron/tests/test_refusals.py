"""The plan refuses what Megatron refuses, asked of Megatron itself: its groups, its config and its model."""

import itertools
from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from whet.data.model_info import ModelInfo
from whet_megatron import architecture, groups, layers
from whet_megatron.config import MegatronConfig, problems
from whet_megatron.cpu_shim import on_cpu
from whet_megatron.model import HeldModel, transformer_config
from whet_megatron.parallel import ParallelConfig

DENSE = {
    "model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "head_dim": 8,
    "num_key_value_heads": 2, "intermediate_size": 72, "vocab_size": 375, "rms_norm_eps": 1e-6,
}  # fmt: skip
MIXED = {**DENSE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
AXES = {
    "tensor": (1, 2, 3), "sequence": (False, True), "pipeline": (1, 2, 3), "virtual": (1, 2, 4), "context": (1, 2),
    "expert": (1, 2, 3), "expert_tensor": (1, 2),
}  # fmt: skip
PLAN_ALONE = {
    "does not divide the model's 2 key heads": "Megatron copies them, and such weights are not written yet",
    "leave it out": "Megatron ignores it",
    "would not add up the gradients of experts": "Megatron trains, and gradients are wrong",
    "with sequence: true alone": "Megatron refuses in the first step",
}
"""Words of what Megatron does not refuse while it builds a model, and why the plan does."""


@pytest.fixture(autouse=True)
def _no_gloo(monkeypatch):
    """Make no groups of gloo: a single process stands for all ranks, and nobody would answer."""
    from megatron.core import parallel_state

    real = parallel_state.initialize_model_parallel
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", partial(real, create_gloo_process_groups=False))


@contextmanager
def rank_zero_of(ranks):
    """Be rank 0 of so many ranks: collectives return at once."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def refused(config, info, ranks):
    """Return what Megatron raises when rank 0 builds its stages. Empty: nothing."""
    arch, sizes = architecture.read(info), config.parallel
    held = HeldModel.__new__(HeldModel)
    held.architecture, held.layers, held.value, held._multiple = arch, "test", False, config.vocabulary_multiple
    held.dtype = torch.bfloat16 if info.dtype == "bfloat16" else torch.float32
    held._ranks = SimpleNamespace(sizes=sizes, device=torch.device("cpu"))
    with on_cpu(), rank_zero_of(ranks):
        try:
            groups._initialize(sizes)
            groups.seed(0)
            held.config = transformer_config(arch, config, held._ranks, held.dtype, "test")
            for number in range(sizes.virtual):
                held._stage(number)
        except (ValueError, RuntimeError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def cases():
    """Yield sizes of the axes: all pairs of values, in cases of few ranks and of few changes."""
    names = list(AXES)
    base = {name: values[0] for name, values in AXES.items()}
    seen = set()
    for one, other in itertools.combinations(names, 2):
        for values in itertools.product(AXES[one], AXES[other]):
            sizes = {**base, one: values[0], other: values[1]}
            if tuple(sizes.values()) not in seen:
                seen.add(tuple(sizes.values()))
                yield sizes
    for extra in (
        {"tensor": 2, "sequence": True, "expert": 2}, {"tensor": 2, "sequence": True, "expert_tensor": 2},
        {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2, "expert_tensor": 2},
        {"tensor": 2, "pipeline": 2, "context": 2}, {"pipeline": 2, "virtual": 2, "context": 2},
    ):  # fmt: skip
        yield {**base, **extra}


def numbers_of_ranks(sizes):
    least = sizes["tensor"] * sizes["context"] * sizes["pipeline"]
    return sorted({least, 2 * least, sizes["pipeline"] * sizes["expert"] * sizes["expert_tensor"], 6})


def test_the_plan_accepts_what_megatron_builds_and_refuses_what_it_refuses():
    layers.choose("test", torch.device("cpu"))
    outcomes = Counter()
    options = itertools.cycle(itertools.product((False, True, "selective"), ("float32", "bfloat16")))
    for shape, sizes in itertools.product((DENSE, MIXED), cases()):
        checkpointing, dtype = next(options)
        config = MegatronConfig(parallel=ParallelConfig(**sizes), gradient_checkpointing=checkpointing)
        info = ModelInfo("model", shape, dtype)
        for ranks in numbers_of_ranks(sizes):
            found = [f"{one.path} {one.message}" for one in problems(config, info, ranks)]
            error = refused(config, info, ranks)
            what = (shape["model_type"], sizes, ranks)
            assert found or not error, (what, error)
            if found and not error:
                assert all(any(words in one for words in PLAN_ALONE) for one in found), (what, found)
            outcomes[bool(found), bool(error)] += 1
    assert min(outcomes[False, False], outcomes[True, True], outcomes[True, False]) > 20, outcomes
