"""A logger that wants events sees what happens in a run, and one that cannot take them is dropped."""

import json
from pathlib import Path

from whet.data.files import read_rows


def test_a_run_tells_its_loggers_what_happens_in_order(tmp_path, small_run, whet):
    config = small_run(
        tmp_path,
        run={"folder": str(tmp_path / "run"), "steps": 3, "save_every": 2, "save_in_background": False},
        evaluation={"every": 3, "environments": [{"use": "even", "split": "train", "limit": 2}]},
        loggers=["seeing", {"use": "seeing", "fails_at": "opened"}],
        cluster={"workers": "inline"},
        plugins=[str(Path(__file__).parent / name) for name in ("even_digits.py", "told_logger.py")],
    )
    assert whet("run", config).code == 0
    run = tmp_path / "run"
    told = [json.loads(line) for line in (run / "seen.jsonl").read_text().splitlines()]
    assert [(kind, rest[0]) for kind, *rest in told] == [
        ("opened", 0), ("watcher failed", None), ("evaluation", 0), ("log", 0),
        ("histograms", 1), ("log", 1), ("step", 1),
        ("rollouts", 1), ("histograms", 2), ("log", 2), ("step", 2), ("rollouts", 2), ("saved", 2),
        ("evaluation", 3), ("histograms", 3), ("log", 3), ("step", 3), ("rollouts", 3), ("saved", 3), ("exported", 3),
        ("closed", None), ("close", False),
    ]  # fmt: skip
    events = {(kind, rest[0]): rest[1:] for kind, *rest in told if len(rest) == 4}
    assert events["watcher failed", None][1]["who"] == "logger seeing-1"
    name, figures, episodes = events["evaluation", 3]
    assert (name, figures["figures"]["reward"]["tasks"]) == ("even", 2)
    assert episodes == list(read_rows(run / "evaluations/step-000003-even.jsonl"))
    assert events["rollouts", 2][2] == list(read_rows(run / "rollouts/step-000002.jsonl"))
    found = list(read_rows(run / "histograms.jsonl"))
    assert events["histograms", 1][2] == [row for row in found if row["step"] == 1]
    assert [row["name"] for row in found] == ["advantages", "logprob_gap"] * 3
    tokens = {row["step"]: sum(row["counts"]) for row in found if row["name"] == "advantages"}
    trained = {n: sum(r["response_length"] for r in read_rows(run / f"rollouts/step-{n:06d}.jsonl")) for n in (1, 2, 3)}
    assert tokens == trained
