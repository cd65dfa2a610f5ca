"""PPO on the real backend: the same numbers however a batch is cut, runs that learn, and go on as they were."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from whet.component import Spec
from whet.data.batch import Batch, concatenate
from whet.data.files import read_rows
from whet.run.compose import run
from whet.runtime.local import LocalCluster
from whet_testing.batches import random_batch, token_advantages
from whet_testing.journal import check

POLICY = {"likelihood": {"weight": 0.1, "at_least": 0.0}, "entropy_weight": 0.01, "clip_high": 0.28}
LOSSES = {
    "lm": Spec("whet_ppo.losses:PpoClip", "whet_ppo.config:PpoClipConfig", POLICY),
    "value": Spec("whet_ppo.losses:ValueClip", "whet_ppo.config:ValueClipConfig", {}),
}
"""By the head of the model that is trained with them."""


def some_batch(seed: int = 0) -> Batch:
    columns = ("advantages", "sampler_logprobs", "old_logprobs", "reward", "returns", "old_values", "temperature")
    return random_batch(
        seed, columns=columns, vocabulary=300,
        makers={"advantages": token_advantages, "returns": token_advantages, "old_values": token_advantages},
    )  # fmt: skip


def numbers(metrics: Any) -> dict[str, float]:
    return {name: m.number() for name, m in metrics.items() if not name.startswith(("seconds/", "memory/"))}


@pytest.mark.parametrize("head", LOSSES)
def test_micro_batches_layout_and_order_do_not_matter(backend, head):
    batch = some_batch()
    shuffled = concatenate(batch.split(12, seed=3))
    expected = numbers(backend(head=head).train(batch, LOSSES[head]))
    assert expected["grad_norm"] > 0
    for config, given in (
        ({"micro_batch_tokens": 24}, batch),
        ({"micro_batch_tokens": 24, "layout": "padded"}, shuffled),
        ({"layout": "packed"}, shuffled),
        ({"layout": "shared"}, shuffled),
    ):
        found = numbers(backend(head=head, **config).train(given, LOSSES[head]))
        assert found == pytest.approx(expected, rel=5e-5, abs=1e-6)


@pytest.mark.parametrize("head", LOSSES)
def test_two_ranks_give_the_numbers_of_one(backend, tmp_path, head):
    batch = some_batch(1)
    one = backend(head=head)
    with LocalCluster(tmp_path / "logs") as cluster:
        two = backend(cluster.worker_group("backend", 2), micro_batch_tokens=40, head=head)
        expected, found = (numbers(which.train(batch, LOSSES[head])) for which in (one, two))
        assert found == pytest.approx(expected, rel=5e-5, abs=1e-6)
        two.close()


def write(folder: Path, model: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "run": {"folder": str(folder / "run"), "steps": 8, "save_every": 4},
        "model": {"path": str(model)},
        "algorithm": {"use": "ppo", "prompts_per_step": 16, "minibatches": 2, "critic_warmup": 1},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
        "roles": {"critic": {"like": "backend", "head": "value"}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 12},
        "environments": [{"use": "even"}],
        "plugins": [str(Path(__file__).parent / "even_digits.py")],
        "cluster": {"workers": "inline", "threads": {"backend": 1}},
        "loggers": [],
        **changes,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def rows(folder: Path) -> list[dict[str, float]]:
    kept = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith(("seconds/", "memory/", "probe/"))}
        for row in kept
    ]


def test_a_short_run_learns_and_its_critic_too(tmp_path, tiny_model_folder):
    algorithm = {"use": "ppo", "prompts_per_step": 8, "group_size": 4, "minibatches": 2, "critic_warmup": 1}
    backend = {"use": "fsdp2", "optimizer": {"lr": 3.0e-3}}
    assert run(write(tmp_path, tiny_model_folder, algorithm=algorithm, backend=backend), ["run.steps=12"]).finished
    found = rows(tmp_path)
    assert "loss" not in found[0]
    assert "critic/loss" in found[0]
    first, last = (np.mean([row["reward/mean"] for row in part]) for part in (found[:3], found[-3:]))
    assert last > first + 0.1
    assert found[-1]["critic/explained_variance"] > found[0]["critic/explained_variance"]
    assert all(row["logprob_gap/max"] < 1e-3 for row in found[2:])
    spans = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"seconds/critic.forward", "seconds/backend.forward", "seconds/critic.optimizer"} <= set(spans[-1])


def test_answers_of_older_weights_teach_policy_and_critic_and_none_is_lost(tmp_path, tiny_model_folder):
    changes = {
        "algorithm": {"use": "ppo", "prompts_per_step": 8, "group_size": 4, "minibatches": 2},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 3.0e-3}},
        "rollout": {"max_tokens": 12, "max_staleness": 2},
    }
    path = write(tmp_path, tiny_model_folder, **changes)
    run(path, ["run.steps=8"])
    assert run(path, ["run.steps=16"]).finished
    assert check(tmp_path / "run") == []
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 17))
    assert {row["staleness/max"] for row in found} == {0, 1, 2}
    # the ratio is against who sampled, so with weights that are older it is not 1
    assert any(abs(row["ratio/mean"] - 1) > 1e-4 for row in found if row["staleness/max"] > 0)
    first, last = (np.mean([row["reward/mean"] for row in part]) for part in (found[:3], found[-3:]))
    assert last > first + 0.1
    assert found[-1]["critic/explained_variance"] > found[0]["critic/explained_variance"]


def test_with_staleness_and_one_optimizer_step_a_correction_needs_no_further_pass(tmp_path, tiny_model_folder):
    algorithm = {"use": "ppo", "prompts_per_step": 8, "minibatches": 1, "correction": {"weights": "token", "cap": 1.5}}
    rollout = {"max_tokens": 12, "max_staleness": 1}
    assert run(write(tmp_path, tiny_model_folder, algorithm=algorithm, rollout=rollout), ["run.steps=3"]).finished
    assert "score" not in {
        span["phase"] for span in read_rows(tmp_path / "run/spans.jsonl") if span["role"] == "backend"
    }
    assert all(0 < row["correction/weight/max"] <= 1.5 for row in rows(tmp_path))


def test_learning_rates_fall_over_all_optimizer_steps_of_a_model(tmp_path, tiny_model_folder):
    changes = {
        "algorithm": {"use": "ppo", "prompts_per_step": 4, "minibatches": 2, "critic_epochs": 2, "critic_warmup": 1},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}, "schedule": {"kind": "linear"}},
    }
    run(write(tmp_path, tiny_model_folder, **changes), ["run.steps=3"])
    found = rows(tmp_path)
    of_policy, of_critic = (1.5, 3.5), (2.5, 6.5, 10.5)  # the middle of the optimizer steps of each step of the run
    assert [row["lr"] for row in found[1:]] == pytest.approx([1e-3 * (1 - middle / 4) for middle in of_policy])
    assert [row["critic/lr"] for row in found] == pytest.approx([1e-3 * (1 - middle / 12) for middle in of_critic])


def test_a_resumed_run_gives_the_same_numbers(tmp_path, tiny_model_folder):
    changes = {
        "algorithm": {
            "use": "ppo", "prompts_per_step": 8, "minibatches": 2, "epochs": 2, "critic_warmup": 3,
            "gae": {"adaptive_alpha": 0.5, "truncated": "bootstrap"}, "kl_reward": {"weight": 0.05},
            "loss": {"use": "ppo-clip", "likelihood": {"weight": 0.1, "at_least": 0.1}},
        },
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}, "reference": True},
        "roles": {"critic": {"use": "fsdp2", "head": "value", "optimizer": {"lr": 1.0e-3}}},
    }  # fmt: skip
    run(write(tmp_path / "whole", tiny_model_folder, **changes))
    halves = write(tmp_path / "halves", tiny_model_folder, **changes)
    run(halves, ["run.steps=4"])
    run(halves)
    assert rows(tmp_path / "halves") == rows(tmp_path / "whole")
    assert any(row["response_length/cut"] > 0 for row in rows(tmp_path / "whole"))
    model = "run/model/model.safetensors"
    assert (tmp_path / "halves" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()
