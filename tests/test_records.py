"""What a run records token by token is what happened, and recording it changes nothing."""

import numpy as np

from whet.run_folder import read_rows
from whet.testing.runs import numbers


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
