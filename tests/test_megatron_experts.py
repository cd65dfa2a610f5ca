"""Mixtures of experts with the backend `megatron`: the numbers of `fsdp2`, and the sampler's experts replayed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.run import compose
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.config import OptimizerConfig as Fsdp2Optimizer
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig, OptimizerConfig
from whet_testing.role_context import make_context
from whet_testing.three_steps import LIKELIHOOD, grouped_batch
from whet_training.experts import ExpertsConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here"),
]
LAYERS, EXPERTS, CHOSEN = 2, 8, 2


@pytest.fixture(scope="module", autouse=True)
def _forked() -> None:
    """Start worker processes, not as forks: a process in which Megatron has run before would break them."""


def recorded(seed: int) -> Any:
    """Return a batch with experts that a sampler might have recorded, for most tokens."""
    batch, draw = grouped_batch(seed), np.random.default_rng(seed)
    chosen = np.argsort(draw.random((batch.tokens, LAYERS, EXPERTS)), -1)[:, :, :CHOSEN]
    chosen[draw.random(batch.tokens) < 0.2] = -1
    return batch.with_columns(routed_experts=chosen.reshape(batch.tokens, -1).astype(np.int16))


@pytest.mark.parametrize(
    "experts",
    [
        ExpertsConfig(balance=0.5, z_loss=0.1, record=True),
        ExpertsConfig(balance=0.5, z_loss=0.1, replay=True),
        ExpertsConfig(balance=0.5, balance_of="model"),
        ExpertsConfig(balance=0.5, balance_over="micro-batch"),
    ],
    ids=["losses", "replay", "of the model", "over micro-batches"],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_losses_gradients_and_metrics_are_those_of_fsdp2(tiny_models, tmp_path, experts, family):
    model = tiny_models(family, tied=False)
    common: dict[str, Any] = {"experts": experts, "layout": "packed", "micro_batch_tokens": 60}
    ones = [
        Fsdp2Backend(
            Fsdp2Config(optimizer=Fsdp2Optimizer(lr=1e-3), **common), make_context(tmp_path / "one", "backend", model)
        ),
        MegatronBackend(
            MegatronConfig(optimizer=OptimizerConfig(lr=1e-3), **common),
            make_context(tmp_path / "two", "backend", model),
        ),
    ]
    for seed in range(3):
        batch = recorded(seed)
        expected, found = (
            {name: one.number() for name, one in backend.train(batch, LIKELIHOOD).items()
             if not name.startswith(("seconds/", "memory/"))}
            for backend in ones
        )  # fmt: skip
        assert found.keys() == expected.keys()
        assert "experts/balance_loss" in found
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for backend in ones:
        backend.close()


@pytest.mark.parametrize("parallel", [{"expert": 2}, {"pipeline": 2}], ids=["expert", "pipeline"])
def test_what_the_sampler_chose_computes_on_two_ranks(tmp_path, small_run, tiny_models, parallel):
    experts = {"replay": True, "balance": 0.01}
    config = small_run(
        tmp_path,
        model={"path": str(tiny_models("qwen3_moe"))},
        backend={"use": "megatron", "optimizer": {"lr": 1.0e-2}, "parallel": parallel, "experts": experts},
        cluster={"threads": {"backend": 1, "generator": 1}, "ranks": {"backend": 2}},
    )
    compose.run(config)
    lines = Path(tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    for row in map(json.loads, lines):
        assert row["routing/disagreement"] == 0
        assert row["routing/overruled"] < 0.01
        assert row["logprob_gap/max"] < 1e-4
        assert row["experts/load_max"] > 1
