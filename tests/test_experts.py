"""Runs with a mixture of experts: weights travel under stored names, and routing is recorded and replayed."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from whet.errors import ConfigError
from whet.run import compose

pytestmark = pytest.mark.timeout(300)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def rows_of_a_replay(config: Path, folder: Path) -> list[dict]:
    """Run it, assert that trainer and sampler agree in each step, and return the metrics."""
    compose.run(config)
    rows = metrics(folder / "run")
    assert len(rows) == 3
    for row in rows:
        assert row["routing/disagreement"] == 0
        assert row["logprob_gap/max"] < 1e-4
    return rows


def backend(**experts: object) -> dict:
    return {"use": "fsdp2", "optimizer": {"lr": 1.0e-2}, "experts": experts}


TURNS = {"environments": [{"use": "two-turns"}], "plugins": [str(Path(__file__).parent / "two_turns.py")]}


SHARED = {"generator": {"use": "hf", "weights": "shared"}}


@pytest.mark.parametrize("played", [{}, TURNS, SHARED], ids=["one turn", "two turns", "shared weights"])
def test_a_replay_leaves_no_disagreement(tmp_path, small_run, tiny_models, played):
    folder = tiny_models("qwen3_moe")
    experts = backend(replay=True, balance=0.01)
    config = small_run(tmp_path, model={"path": str(folder)}, backend=experts, cluster={"workers": "inline"}, **played)
    for row in rows_of_a_replay(config, tmp_path):
        assert row["experts/load_max"] > 1
    with (
        safe_open(tmp_path / "run/model/model.safetensors", "pt") as made,
        safe_open(folder / "model.safetensors", "pt") as given,
    ):
        assert set(made.keys()) == set(given.keys())


def test_a_replay_leaves_no_disagreement_where_adapters_of_experts_lie_beside_shared_weights(
    tmp_path, small_run, tiny_models
):
    """The sampler computes with the modules of the trainer, and puts the adapters of experts into them for a moment."""
    lora = {**backend(replay=True), "lora": {"rank": 4, "experts": True}}
    config = small_run(
        tmp_path, model={"path": str(tiny_models("qwen3_moe"))}, backend=lora, cluster={"workers": "inline"}, **SHARED
    )
    rows_of_a_replay(config, tmp_path)


@pytest.mark.slow
def test_between_processes_and_over_two_ranks_the_sampler_gets_the_weights_of_the_trainer(
    tmp_path, small_run, tiny_models
):
    cluster = {"threads": {"backend": 1, "generator": 1}, "ranks": {"backend": 2}, "colocate": []}
    config = small_run(
        tmp_path,
        model={"path": str(tiny_models("mixtral", tied=False))},
        backend=backend(record=True, z_loss=0.01),
        cluster=cluster,
        weight_sync={"probe": {"every": 1}},
    )
    compose.run(config)
    rows = metrics(tmp_path / "run")
    assert json.loads((tmp_path / "run/plan.json").read_text())["way"]["transport"] == "shared-memory"
    assert max(row["probe/logprob_gap"] for row in rows) < 1e-4
    assert max(row["logprob_gap/max"] for row in rows) < 1e-4
    assert max(row["routing/disagreement"] for row in rows) < 0.01


def test_who_cannot_record_what_is_wanted_is_refused_by_the_plan(tmp_path, small_run, tiny_models):
    config = small_run(tmp_path, backend=backend(replay=True))
    with pytest.raises(ConfigError, match="wants the column 'routed_experts' of a generator, and the generator hf"):
        compose.run(config)
    sft = small_run(
        tmp_path,
        model={"path": str(tiny_models("qwen3_moe"))},
        algorithm={"use": "sft"},
        data={"train": [{"path": "none.jsonl"}]},
        backend=backend(record=True),
        environments=[],
    )
    with pytest.raises(ConfigError, match="wants the column 'routed_experts' of a generator, and data has none"):
        compose.run(sft)
