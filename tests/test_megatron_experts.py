"""Mixtures of experts with the backend `megatron`: the numbers of `fsdp2`, the sampler's experts replayed, adapters."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from safetensors.numpy import load_file

from whet.errors import WhetError
from whet.run import compose
from whet.runtime.local import LocalCluster
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.config import OptimizerConfig as Fsdp2Optimizer
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig, OptimizerConfig
from whet_megatron.parallel import ParallelConfig
from whet_testing.held import held_processes
from whet_testing.role_context import make_context
from whet_testing.three_steps import LIKELIHOOD, grouped_batch, steps_of
from whet_training.experts import ExpertsConfig
from whet_training.lora_config import LoraConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here"),
]
IMPORTS = ("whet_megatron.worker", "whet_megatron.ahead")
LAYERS, EXPERTS, CHOSEN = 2, 8, 2


@pytest.fixture(scope="module", autouse=True)
def _forked() -> None:
    """Do not fork workers from this process: Megatron may have run in it."""


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


LORA = LoraConfig(rank=4, alpha=6.0, experts=True)
RATES = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Start two and four processes once, for the backends that one test builds."""
    groups = {tuple(f"backend{number}-of-{ranks}" for number in range(1, 6)): ranks for ranks in (2, 4)}
    with held_processes(tmp_path_factory.mktemp("logs"), groups, IMPORTS) as made:
        yield made


@pytest.fixture
def build(tmp_path: Path, cluster: LocalCluster) -> Iterator[Callable[..., Any]]:
    """Return a function that builds a backend with adapters of experts: on ranks `megatron`, on none `fsdp2`."""
    built: list[Any] = []

    def make(model: Path, ranks: int = 0, lora: LoraConfig = LORA, **config: Any) -> Any:
        role = f"backend{len(built) + 1}-of-{ranks}"
        place = cluster.worker_group(role, ranks) if ranks > 1 else None
        context = make_context(tmp_path / role, "backend", model, place)
        if ranks:
            made = MegatronConfig(optimizer=OptimizerConfig(**RATES), lora=lora, **config)
            built.append(MegatronBackend(made, context))
        else:
            built.append(Fsdp2Backend(Fsdp2Config(optimizer=Fsdp2Optimizer(**RATES), lora=lora), context))
        return built[-1]

    yield make
    for backend in built:
        backend.close()


def adapter(folder: Path) -> Any:
    """Return the tensors of an adapter by name, and its config."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return load_file(folder / "adapter_model.safetensors"), config


SPLITS = {
    "one rank": ("mixtral", 1, {}, False),
    "tensor": ("qwen3_moe", 2, {"tensor": 2, "sequence": True, "expert_tensor": 2}, True),
    "tensor and expert": ("qwen3_moe", 4, {"tensor": 2, "sequence": True, "expert": 2}, True),
}


@pytest.mark.parametrize("split", SPLITS)
def test_adapters_of_experts_are_drawn_and_trained_as_by_fsdp2_and_each_reads_those_of_the_other(
    build, tiny_models, tmp_path, split
):
    family, ranks, sizes, grouped = SPLITS[split]
    model, options = tiny_models(family), {"parallel": ParallelConfig(**sizes), "grouped_experts": grouped}
    batches = [grouped_batch(seed) for seed in range(3)]
    theirs, ours = build(model), build(model, ranks, micro_batch_tokens=40, **options)
    for backend, name in ((theirs, "their start"), (ours, "our start")):
        backend.save(tmp_path / name).result()
    (expected, config), (found, own) = adapter(tmp_path / "their start"), adapter(tmp_path / "our start")
    assert own == config
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], tensor) for name, tensor in expected.items())
    np.testing.assert_allclose(steps_of(ours, batches), steps_of(theirs, batches), rtol=1e-4)
    for backend, name in ((theirs, "theirs"), (ours, "ours")):
        backend.save(tmp_path / name).result()
    again = (
        (ours, build(model, lora=evolve(LORA, adapter=str(tmp_path / "ours")))),
        (theirs, build(model, ranks, evolve(LORA, adapter=str(tmp_path / "theirs")), **options)),
    )
    for before, after in again:
        first, second = (one.score(batches[0], ("logprobs",))["logprobs"] for one in (before, after))
        np.testing.assert_allclose(second, first, atol=1e-4)
    with pytest.raises(WhetError, match=r"experts.*\.lora_A\.weight, which backend\.lora does not train"):
        build(model, 1, evolve(LORA, experts=False, adapter=str(tmp_path / "ours")))


@pytest.mark.parametrize("content", ["merged", "adapter"])
def test_hf_samples_with_adapters_of_experts(tmp_path, small_run, tiny_models, content):
    lora = {"rank": 4, "experts": True, "targets": [r".*layers\.0\.self_attn\.q_proj"]}
    config = small_run(
        tmp_path,
        model={"path": str(tiny_models("mixtral"))},
        backend={"use": "megatron", "optimizer": {"lr": 1.0e-2}, "parallel": {"expert": 2}, "lora": lora},
        weight_sync={"content": content},
        cluster={"threads": {"backend": 1, "generator": 1}, "ranks": {"backend": 2}},
    )
    compose.run(config)
    lines = Path(tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    for row in map(json.loads, lines):
        assert row["logprob_gap/max"] < 1e-4
