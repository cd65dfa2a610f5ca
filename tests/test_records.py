"""What a run records token by token is what happened, and recording it changes nothing."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from whet.data.files import read_rows
from whet_testing.runs import numbers


def rollouts(run):
    return [row for file in sorted(run.glob("rollouts/*")) for row in read_rows(file)]


def test_recording_every_token_changes_no_bit(tmp_path, small_run, whet):
    runs = []
    for every in (0, 1):
        folder = tmp_path / f"every-{every}"
        folder.mkdir()
        config = small_run(folder, rollout={"max_tokens": 8, "record": {"every": every, "groups": 4}})
        assert whet("run", config).code == 0
        runs.append(folder / "run")
    without, recorded = runs
    assert numbers(without) == numbers(recorded)
    assert (without / "model/model.safetensors").read_bytes() == (recorded / "model/model.safetensors").read_bytes()
    assert rollouts(without) == [{k: v for k, v in row.items() if k != "sequences"} for row in rollouts(recorded)]

    sequences = [sequence for row in rollouts(recorded) for sequence in row["sequences"]]
    assert len(sequences) == 3 * 4 * 2
    for sequence in sequences:
        sampler, trainer = np.array(sequence["sampler_logprobs"]), np.array(sequence["trainer_logprobs"])
        mask = np.array(sequence["loss_mask"], bool)
        assert (trainer[mask] < 0).all()
        assert (trainer[~mask] == 0).all()
        np.testing.assert_allclose(sampler, trainer, atol=1e-4)  # two implementations of one model in float32
        assert "advantages" in sequence["columns"]
    spans = [(row["role"], row["phase"]) for row in read_rows(recorded / "spans.jsonl")]
    assert spans.count(("backend", "record")) == 3


@pytest.fixture
def group_may_read():
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(file: Path) -> str:
    return f"{stat.S_IMODE(file.stat().st_mode):o}"


def test_weights_are_as_the_umask_says_and_what_the_model_said_is_private(tmp_path, small_run, whet, group_may_read):
    evaluation = {"every": 3, "environments": [{"use": "arithmetic", "limit": 2}]}
    config = small_run(tmp_path, evaluation=evaluation)
    assert whet("run", config).code == 0
    run = tmp_path / "run"
    private = {file for name in ("rollouts", "evaluations") for file in (run / name).rglob("*.jsonl")}
    assert len(private) == 3 + 2 + 2  # steps, and of two evaluations episodes and tasks
    written = {file for file in run.rglob("*") if file.is_file()} - private
    assert {file.name for file in written} > {"model.safetensors", "tensors-00001.safetensors", "metrics.jsonl"}
    wanted = {"600": private, "640": {file for file in written if file.name != ".lock"}}
    assert wanted == {bits: {file for file in files if mode(file) == bits} for bits, files in wanted.items()}
    assert whet("export", run, tmp_path / "exported").code == 0
    assert {mode(file) for file in (tmp_path / "exported").iterdir()} == {"640"}
