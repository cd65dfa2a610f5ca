"""Runs with the backend `megatron`: it takes the place of `fsdp2` by its name alone."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.component import Selection, Spec
from whet.config.build import to_spec
from whet.config.structure import structure
from whet.data.batch import Batch
from whet.plugins.registry import load_plugins
from whet.runtime.local import LocalCluster
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.config import OptimizerConfig as Fsdp2Optimizer
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig, OptimizerConfig
from whet_megatron.parallel import ParallelConfig
from whet_testing.batches import random_batch
from whet_testing.held import held_processes
from whet_testing.journal import check
from whet_testing.role_context import make_context
from whet_testing.runs import numbers
from whet_training.lora_config import LoraConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here"),
]
IMPORTS = ("whet_megatron.worker", "whet_megatron.ahead")
SPLIT = {"use": "megatron", "optimizer": {"lr": 1.0e-3}, "parallel": {"tensor": 2, "sequence": True}}
ADAPTER = {**SPLIT, "optimizer": {"lr": 1.0e-2}, "lora": {"rank": 4}}
STAGES = {"use": "megatron", "optimizer": {"lr": 1.0e-3}, "parallel": {"pipeline": 2}}
TEN = ("clipped-pg", "nll")
LOSSES: list[dict[str, Any]] = [
    {"use": "nll"},
    {"use": "clipped-pg", "clip_dual": 3.0, "entropy": True, "kl": {"weight": 0.1, "importance": "ratio"}},
    {"use": "gspo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence"},
    {"use": "cispo"},
    {"use": "reinforce", "aggregation": "constant", "max_length": 9, "count_empty": True},
    {"use": "ppo-clip", "likelihood": {"weight": 0.2, "at_least": 0.0}},
    {"use": "dpo"},
    {"use": "topk-kl"},
    {"use": "full-kl", "forward": 0.4},
    {"use": "full-kl", "divergence": "jensen-shannon"},
]
VALUE_LOSSES: list[dict[str, Any]] = [{"use": "value-clip"}, {"use": "bradley-terry", "centering": 0.01}]
COLUMNS = ("advantages", "old_logprobs", "sampler_logprobs", "reference_logprobs", "version", "chosen", "reward")
SPLITS = {"tensor": {"tensor": 2, "sequence": True}, "pipeline": {"pipeline": 2}, "context": {"context": 2}}


def spec(document: dict[str, Any]) -> Spec:
    registry = load_plugins()
    offer = registry.find("losses", document["use"])
    keys = {key: value for key, value in document.items() if key != "use"}
    config: Any = structure(keys, offer.component.config, registry)
    return to_spec(Selection("losses", offer.component, config, offer.distribution))


def batch_for(number: int) -> Batch:
    """Return a batch with every column that a loss reads: of pairs, tokens of a teacher, or values."""
    draw = np.random.default_rng(number)
    batch = random_batch(number, columns=COLUMNS, unit_size=2, group_size=2, vocabulary=200)
    return batch.with_columns(
        returns=draw.normal(size=batch.tokens).astype(np.float32),
        old_values=draw.normal(size=batch.tokens).astype(np.float32),
        topk_ids=draw.integers(3, 200, (batch.tokens, 3)).astype(np.int32),
        teacher_topk_logprobs=-draw.exponential(4.0, (batch.tokens, 3)).astype(np.float32),
    )


def built(cluster: LocalCluster, folder: Path, model: Path, role: str, sizes: dict[str, Any], **config: Any) -> Any:
    """Return both backends: `fsdp2` on one rank in this process, `megatron` on two."""
    lr = config.pop("lr", 1e-3)
    ours = {key: value for key, value in config.items() if key != "layout"}
    one = Fsdp2Backend(
        Fsdp2Config(optimizer=Fsdp2Optimizer(lr=lr), **ours), make_context(folder / "one", "backend", model)
    )
    settings = MegatronConfig(optimizer=OptimizerConfig(lr=lr), parallel=ParallelConfig(**sizes), **config)
    place = cluster.worker_group(role, 2)
    return one, MegatronBackend(settings, make_context(folder / "other", role, model, place))


@pytest.fixture(scope="module", autouse=True)
def _forked() -> None:
    """Do not fork workers from this process: Megatron may have run in it."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with held_processes(tmp_path_factory.mktemp("logs"), {("backend2",): 2}, IMPORTS) as made:
        yield made


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all weights", "adapter"])
@pytest.mark.parametrize("name", TEN)
def test_ten_steps_of_both_backends_from_one_start_agree(name, lora, cluster, tiny_model_folder, tmp_path):
    loss = spec({"use": name})
    batches = [batch_for(seed) for seed in range(10)]
    one, other = built(cluster, tmp_path, tiny_model_folder, "backend2", SPLITS["tensor"], lora=lora)
    try:
        found = [[backend.train(batch, loss) for batch in batches] for backend in (one, other)]
        values = [[(step["loss"].number(), step["grad_norm"].number()) for step in steps] for steps in found]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-4, atol=1e-6)
        assert of_loss(found[0][0]).keys() == of_loss(found[1][0]).keys()
    finally:
        one.close()
        other.close()


def of_loss(found: Any) -> dict[str, float]:
    """Return the metrics of a call without times and memory."""
    return {key: one.number() for key, one in found.items() if not key.startswith(("seconds/", "memory/"))}


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_every_loss_has_one_value_one_gradient_and_one_set_of_metrics(
    cluster, tiny_model_folder, tiny_models, tmp_path, head, split, layout
):
    teacher = {"teacher": str(tiny_models("llama", seed=1))} if head == "lm" else {}
    options = {**teacher, "head": head, "layout": layout, "micro_batch_tokens": 40, "lr": 1e-6}
    one, other = built(cluster, tmp_path, tiny_model_folder, "backend2", SPLITS[split], **options)
    try:
        for number, document in enumerate(LOSSES if head == "lm" else VALUE_LOSSES):
            loss = spec(document)
            batch = batch_for(number)
            expected, found = (of_loss(backend.train(batch, loss)) for backend in (one, other))
            assert found.keys() == expected.keys(), document
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (document, name)
    finally:
        one.close()
        other.close()


@pytest.mark.parametrize("backend", [SPLIT, STAGES, ADAPTER], ids=["tensor", "pipeline", "adapter"])
def test_a_grpo_run_syncs_weights_saves_and_exports(backend, small_run, whet, tmp_path):
    ranks = {"ranks": {"backend": 2}, "threads": {"backend": 1, "generator": 1}}
    ended = whet("run", small_run(tmp_path, backend=backend, cluster=ranks), folder=tmp_path)
    assert ended.code == 0, ended.error
    run = tmp_path / "run"
    assert check(run) == []
    rows = numbers(run)
    assert len(rows) == 3
    assert all(row["grad_norm"] > 0 for row in rows)
    # the probe after each weight sync: the generator computes what the trainer does
    assert max(row.get("probe/max", 0.0) for row in rows) < 1e-3
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "adapter"])
def test_a_grpo_run_samples_with_the_backend_s_own_weights(lora, small_run, whet, tmp_path):
    generator = {"use": "megatron", "parallel": SPLIT["parallel"], "cache_gib": 0.02}
    ranks = {"ranks": {"backend": 2, "generator": 2}, "threads": {"backend": 1, "generator": 1}}
    config = small_run(tmp_path, backend={**SPLIT, "lora": lora}, generator=generator, cluster=ranks)
    ended = whet("run", config, "weight_sync.probe.every=1", folder=tmp_path)
    assert ended.code == 0, ended.error
    run = tmp_path / "run"
    assert check(run) == []
    rows = numbers(run)
    assert len(rows) == 3
    assert all(row["grad_norm"] > 0 for row in rows)
    assert max(row["probe/logprob_gap"] for row in rows) < 1e-4
    assert max(row["logprob_gap/max"] for row in rows) < 1e-4


def test_a_run_that_was_stopped_goes_on_bitwise(small_run, whet, tmp_path):
    ranks = {"ranks": {"backend": 2}, "threads": {"backend": 1, "generator": 1}}
    ends = []
    for name, parts in (("whole", ["4"]), ("halves", ["2", "4"])):
        folder = tmp_path / name
        folder.mkdir()
        config = small_run(folder, backend=SPLIT, cluster=ranks)
        for steps in parts:
            ended = whet("run", config, f"run.steps={steps}", "run.save_every=1", folder=folder)
            assert ended.code == 0, ended.error
        ends.append(Path(folder / "run"))
    assert numbers(ends[0], "probe/") == numbers(ends[1], "probe/")
    whole, halves = ((end / "model" / "model.safetensors").read_bytes() for end in ends)
    assert whole == halves
