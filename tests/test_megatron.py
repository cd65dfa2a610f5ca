"""Runs with the backend `megatron`: it takes the place of `fsdp2` by its name alone."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from whet.component import Spec
from whet.runtime.local import LocalCluster
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.config import OptimizerConfig as Fsdp2Optimizer
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig, OptimizerConfig
from whet_megatron.parallel import ParallelConfig
from whet_testing.batches import random_batch
from whet_testing.journal import check
from whet_testing.role_context import make_context
from whet_testing.runs import numbers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here"),
]
SPLIT = {"use": "megatron", "optimizer": {"lr": 1.0e-3}, "parallel": {"tensor": 2, "sequence": True}}
STAGES = {"use": "megatron", "optimizer": {"lr": 1.0e-3}, "parallel": {"pipeline": 2}}
LOSSES = {
    "clipped-pg": (Spec("whet_grpo.losses:ClippedPg", "whet_grpo.config:ClippedPgConfig"), 1),
    "likelihood": (Spec("whet_testing.losses:Likelihood"), 1),
}
COLUMNS = ("advantages", "old_logprobs", "sampler_logprobs", "reference_logprobs", "temperature", "version")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with LocalCluster(tmp_path_factory.mktemp("logs")) as made:
        yield made


@pytest.mark.parametrize("name", LOSSES)
def test_ten_steps_of_both_backends_from_one_start_agree(name, cluster, tiny_model_folder, tmp_path):
    loss, unit_size = LOSSES[name]
    batches = [random_batch(seed, columns=COLUMNS, unit_size=unit_size) for seed in range(10)]
    place = cluster.worker_group(name, 2)
    one = Fsdp2Backend(
        Fsdp2Config(optimizer=Fsdp2Optimizer(lr=1e-3)), make_context(tmp_path / "a", "backend", tiny_model_folder)
    )
    config = MegatronConfig(optimizer=OptimizerConfig(lr=1e-3), parallel=ParallelConfig(tensor=2, sequence=True))
    other = MegatronBackend(config, make_context(tmp_path / "b", name, tiny_model_folder, place))
    try:
        found = [[backend.train(batch, loss) for batch in batches] for backend in (one, other)]
        values = [[(step["loss"].number(), step["grad_norm"].number()) for step in steps] for steps in found]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-4, atol=1e-6)
        assert {key for key in found[0][0] if not key.startswith(("seconds/", "memory/"))} == {
            key for key in found[1][0] if not key.startswith(("seconds/", "memory/"))
        }
    finally:
        one.close()
        other.close()


@pytest.mark.parametrize("backend", [SPLIT, STAGES], ids=["tensor", "pipeline"])
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
