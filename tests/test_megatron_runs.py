"""Whole runs with the backend `megatron`: on recorded responses, on each launcher, and killed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import whet
from whet.data.files import read_rows
from whet_testing.runs import numbers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_orphans"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here"),
]
HERE = Path(__file__).parent
STEPS = 10
SPLIT = {"use": "megatron", "optimizer": {"lr": 1.0e-3}, "parallel": {"tensor": 2}}
RANKS = {"ranks": {"backend": 2}, "threads": {"backend": 1, "generator": 1}}


@pytest.fixture(scope="module", autouse=True)
def _forked() -> None:
    """Start worker processes as runs do, not as forks of this process."""


@attrs.frozen
class Recorded:
    """Rollouts that are taken from a run and recorded, or of which the recorded ones are given again."""

    batches: list
    rollouts: object = None

    def take(self, groups):
        if self.rollouts is None:
            return self.batches.pop(0)
        self.batches.append(self.rollouts.take(groups))
        return self.batches[-1]


def test_ten_steps_of_grpo_on_recorded_responses_agree_with_fsdp2(small_run, tmp_path):
    algorithm = {"use": "grpo", "prompts_per_step": 4, "group_size": 4, "minibatches": 2}
    algorithm["loss"] = {"use": "clipped-pg", "kl": {"weight": 0.1}}
    ones = {"use": "fsdp2", "optimizer": SPLIT["optimizer"]}
    batches, found = [], {}
    for backend, cluster in ((ones, {"workers": "inline"}), (SPLIT, RANKS)):
        (folder := tmp_path / backend["use"]).mkdir()
        config = small_run(
            folder,
            run={"folder": str(folder / "run"), "steps": STEPS, "seed": 3},
            backend={**backend, "reference": True}, cluster=cluster, algorithm=algorithm,
        )  # fmt: skip
        with whet.open(config) as parts:
            recorded = Recorded(list(batches)) if batches else Recorded(batches, parts.rollouts)
            parts.algorithm.run(attrs.evolve(parts, rollouts=recorded))
        found[backend["use"]] = list(read_rows(folder / "run/metrics.jsonl"))
    assert len(batches) == STEPS
    for expected, row in zip(found["fsdp2"], found["megatron"], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-4), row["step"]
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3), row["step"]
        assert row["grad_norm"] > 0


def test_ten_steps_give_the_same_bits_in_local_processes_and_on_two_nodes_of_ray(
    small_run, whet, tmp_path, monkeypatch
):  # fmt: skip
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    def trained(name: str, **cluster: object) -> Path:
        (folder := tmp_path / name).mkdir()
        run = {"folder": str(folder / "run"), "steps": STEPS, "seed": 3}
        config = small_run(folder, run=run, backend=SPLIT, cluster={**RANKS, "colocate": [], **cluster})
        ended = whet("run", config, folder=folder, seconds=300)
        assert ended.code == 0, ended.errors
        return folder / "run"

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    nodes = Cluster(initialize_head=True, head_node_args={"resources": {"train": 1, "gen": 1}, **small})
    try:
        nodes.add_node(num_cpus=2, resources={"train": 1}, object_store_memory=80 << 20)
        apart = {"backend": {"train": 1}, "generator": {"gen": 1}}  # each rank of the backend is on a node of its own
        ray = trained("ray", launcher="ray", address=nodes.address, resources=apart)
    finally:
        nodes.shutdown()
    local = trained("local")
    assert len(numbers(local)) == STEPS
    assert numbers(ray) == numbers(local)
    assert (ray / "model/model.safetensors").read_bytes() == (local / "model/model.safetensors").read_bytes()


@pytest.mark.timeout(600)
def test_no_disturbance_leaves_a_wrong_or_silent_state():
    """The short version of `python tests/chaos --layouts two --backend ...`: no bit differs from an undisturbed run."""
    section = {"use": "megatron", "parallel": {"tensor": 2}}
    words = ["--seed", "5", "--kills", "2", "--layouts", "two", "--staleness", "0", "--scenarios", ""]
    command = [sys.executable, HERE / "chaos", "--backend", json.dumps(section), *words]
    patient = {**os.environ, "CHAOS_SLOWNESS": "3"}  # a worker imports Megatron Core when it starts
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=patient)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 faults" in done.stdout
