"""Findings name what stands out, and are silent about what does not."""

import math

from whet_report.findings import findings

FINE = {"state": "finished", "done": 20, "run_attempts": 1, "replica_restarts": 0, "run_restarts": 0}


def texts(rows, run=FINE):
    return [f"{one['level']}: {one['text']}" for one in findings(dict(enumerate(rows, 1)), run)]


def test_a_sound_run_has_nothing_but_its_end_to_tell():
    rows = [{"loss": 1.0, "logprob_gap/mean": 1e-6, "logprob_gap/max": 1e-5, "response_length/cut": 0.0}] * 20
    assert texts(rows) == ["good: The run finished all its 20 steps."]


def test_what_stands_out_is_named_the_gravest_first():
    rows = [
        {
            "logprob_gap/mean": 1e-3 * step,
            "logprob_gap/max": 0.1 * step,
            "response_length/cut": step / 40,
            "reward/std": 0.5 / step**2,
            "episodes/failed": step % 2,
            "loss": math.nan if step > 7 else 1.0,
            "seconds/step": 10,
            "seconds/rollout.take": 9,
        }
        for step in range(1, 41)
    ]
    found = texts(rows, {**FINE, "state": "failed", "done": 40, "run_attempts": 2})
    assert found[:3] == [
        "bad: The run failed after step 40.",
        "bad: loss was not finite, first on step 8.",
        "bad: Sampler and trainer are 0.038 nats apart on an average token.",
    ]
    rest = " ".join(found[3:])
    for part in ("resumed: 2 run attempts",
                 "On step 40 sampler and trainer were 4 nats", "grew from 3.0e-03 to 3.8e-02",
                 "95% of the responses were cut", "hardly differ", "20 episodes failed", "90% of a step"):  # fmt: skip
        assert part in rest


def test_lost_workers_are_told_and_are_no_resumed_run():
    rows = [{"loss": 1.0}] * 20
    lost = texts(rows, {**FINE, "run_attempts": 2, "replica_restarts": 3, "run_restarts": 1})
    assert lost[:2] == [
        "look: Replicas of the generator were lost and restarted: 3.",
        "look: Other workers were lost, and it began again after its last checkpoint: 1.",
    ]
    assert not any("resumed" in text for text in lost)
    again = texts(rows, {**FINE, "run_attempts": 4, "run_restarts": 1})
    assert "look: It was resumed: 3 run attempts." in again
