"""What goes through the driver does so under Ray as well: foreign agents, a run that is talked to, probes."""

import json
import threading
from pathlib import Path

import attrs
import numpy as np
import pytest

import whet
from whet.data.files import read_rows
from whet.errors import WeightSyncError

pytest.importorskip("ray")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
pytest.importorskip("whet_endpoint", reason="whet-endpoint is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks_under_ray", "own_ray")]

HERE = Path(__file__).parent
APART = {"ranks": {"generator": 2}, "threads": {"backend": 1, "generator": 1}, "colocate": []}
RAY = {"launcher": "ray", **APART}
STEPS = 3


@pytest.fixture
def written(tmp_path, small_run):
    """Write the config of a small run whose episodes a foreign agent plays, and which can be talked to."""

    def write(name, **sections):
        (tmp_path / name).mkdir()
        return small_run(
            tmp_path / name,
            run={"folder": str(tmp_path / name / "run"), "steps": STEPS, "seed": 3, "export": False},
            **{
                "environments": [{"use": "foreign-turns"}],
                "plugins": [str(HERE / name) for name in ("foreign_turns.py", "deaf.py")],
                "weight_sync": {"probe": {"every": 1}},
                "endpoint": {"serve": True},
                **sections,
            },
        )

    return write


@attrs.frozen
class Watched:
    """Rollouts whose batches are kept, and in whose midst somebody asks."""

    rollouts: object
    ask: object
    batches: list

    def take(self, groups):
        asking = threading.Thread(target=self.ask)
        asking.start()
        self.batches.append(self.rollouts.take(groups))
        asking.join(60)
        return self.batches[-1]


def trained(config):
    """Train, asking the run's own endpoint at each step; give the batches, and what was answered."""
    said, answers, batches = [{"role": "user", "content": "hello"}], [], []

    def ask():
        address = json.loads((config.parent / "run/endpoint.json").read_text())
        with openai.OpenAI(base_url=address["base_url"], api_key=address["api_key"]) as client:
            answers.append(
                client.chat.completions.create(
                    model="policy", messages=said, n=4, logprobs=True, extra_body={"return_token_ids": True}
                )
            )

    with whet.open(config) as parts:
        parts.algorithm.run(attrs.evolve(parts, rollouts=Watched(parts.rollouts, ask, batches)))
    return batches, answers


def test_foreign_agents_and_whoever_asks_are_recorded_as_without_it(written):
    config = written("ray", cluster=RAY)
    batches, answers = trained(config)
    run = config.parent / "run"
    for number, (batch, row) in enumerate(zip(batches, read_rows(run / "metrics.jsonl"), strict=True)):
        turns = np.diff(np.concatenate([[0], batch["loss_mask"].astype(int)]))
        assert (turns == 1).sum() == 2 * batch.sequences, "each sequence has two turns"
        assert set(batch["version"][batch["loss_mask"]]) == {number}
        assert row["logprob_gap/max"] < 1e-4, "the trainer sees the tokens that the engine saw"
        assert row["probe/logprob_gap"] < 1e-4
    assert len(batches) == STEPS
    rows = list(read_rows(run / "endpoint.jsonl"))
    choices = [choice for answer in answers for choice in answer.choices]
    assert len(rows) == len(choices) == 4 * STEPS
    assert sorted(row["token_ids"] for row in rows) == sorted(choice.token_ids for choice in choices)
    for row in rows:
        assert row["prompt_token_ids"] == answers[0].prompt_token_ids
        assert len(row["logprobs"]) == len(row["token_ids"])
    assert {choice.weight_versions[0][1] for choice in choices} == set(range(STEPS))

    inline, _ = trained(written("inline", cluster={"workers": "inline"}))
    for name in ("tokens", "loss_mask", "prompt_lengths", "group"):
        assert np.array_equal(batches[0][name], inline[0][name]), name
    assert np.allclose(batches[0]["sampler_logprobs"], inline[0]["sampler_logprobs"], atol=1e-5)


def test_a_replica_that_keeps_its_weights_is_named_by_the_probe(written):
    config = written("deaf", cluster=RAY, generator={"use": "deaf-hf", "replica": 1}, endpoint={})
    with (
        pytest.raises(
            WeightSyncError, match=r"^after the weight sync of version 1 replica 1 of the generator does not compute"
        ),
        whet.open(config) as parts,
    ):
        parts.algorithm.run(parts)
    assert not (config.parent / "run/metrics.jsonl").exists()
