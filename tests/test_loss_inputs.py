"""A loss of a single file, through a real backend: it has the step, and every column that its facts name."""

from pathlib import Path

import pytest
import yaml

import whet
from whet.data.files import read_rows


@pytest.fixture
def config(tmp_path, tiny_model_folder):
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 3, "save_every": 1, "export": False},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "grpo", "prompts_per_step": 4, "group_size": 4, "loss": "seeing"},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 4},
        "environments": [{"use": "arithmetic"}],
        "plugins": [str(Path(__file__).parent / "seeing.py")],
        "loggers": [],
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "it.yaml"


@pytest.mark.parametrize("overrides", [[], ["algorithm.old_logprobs=sampler"]])
def test_a_loss_sees_the_step_and_the_old_logprobs(config, tmp_path, overrides):
    for steps in (2, 3):  # the second run resumes
        with whet.open(config, *overrides, f"run.steps={steps}", "cluster.threads={backend: 1}") as parts:
            parts.algorithm.run(parts)
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert [row["seen/step"] for row in rows] == [1, 2, 3]
    assert [row["seen/steps"] for row in rows] == [2, 2, 3]
    assert max(row["seen/change"] for row in rows) < 1e-4  # before the only optimizer step of each
