"""Runs that are disturbed at random moments end in a right state, and what is wrong would be found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

CHAOS = Path(__file__).parent / "chaos"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_disturbance_leaves_a_wrong_or_silent_state():
    """The short version; `python tests/chaos` is the long one."""
    arguments = ["--seed", "5", "--kills", "3", "--layouts", "apart", "--staleness", "1", "--scenarios", ""]
    done = subprocess.run([sys.executable, CHAOS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 faults" in done.stdout


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.syspath_prepend(str(CHAOS))
    import judge

    yield judge
    for name in ("judge", "run_attempt", "strikes", "victims"):
        sys.modules.pop(name, None)


def test_a_driver_that_had_ended_when_it_was_to_be_killed_was_not_hit(judge, monkeypatch):
    strikes = sys.modules["strikes"]
    monkeypatch.setattr(strikes, "_await_moment", lambda *_: [])
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie, which signals can be sent to
    attempt = SimpleNamespace(process=process, phase=lambda: "after.closed", wait=process.wait, said=lambda: "")
    struck = strikes.carry_out(strikes.Strike("kill", "driver", "after.closed", 0, 0.0), attempt, again=False)
    assert (struck.hit, struck.code) == ("", 0)


def opened(after):
    return {"event": "opened", "after_step": after}


def step(number):
    return {"event": "step", "step": number}


def saved(number):
    return {"event": "saved", "step": number}


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([opened(0), step(1), step(2), saved(2), step(3), opened(2), step(3), step(4), saved(4)], None),
        ([opened(0), step(1), step(2), opened(2), step(3)], None),
        ([opened(0), step(1), step(2), saved(2), opened(0), step(1)], "resumed after step 0"),
        ([opened(0), step(1), step(2), step(3), saved(2), opened(2), step(3)], None),
        ([opened(0), step(1), step(2), opened(3)], "resumed after step 3"),
        ([opened(0), step(1), step(3)], "step 3 follows step 1"),
        ([opened(0), step(1), step(2), saved(3)], "saved step 3 after step 2"),
        ([opened(0), step(1), step(2), saved(2), step(3), saved(1)], "saved step 1 after step 3"),
    ],
    ids=[
        "right", "no line of the checkpoint", "checkpoint forgotten", "saved meanwhile", "from nowhere", "a step lost",
        "saved too early", "saved backwards",
    ],
)  # fmt: skip
def test_a_journal_that_does_not_add_up_is_found(judge, rows, fault):
    faults = judge.journal_faults(rows)
    assert [f.startswith(fault) for f in faults] == [True] if fault else faults == []


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda groups: groups, None),
        (lambda groups: [*groups[:-1], 0], "groups [0] were trained on twice"),
        (lambda groups: [*groups[:-1], groups[-1] + 1], "were lost; 0 may have been dropped"),
        (lambda groups: groups[:-1], "was trained on"),
    ],
    ids=["right", "twice", "lost", "too few"],
)
def test_a_group_that_is_lost_or_trained_on_twice_is_found(judge, tmp_path, spoil, fault):
    groups = spoil(list(range(judge.STEPS * judge.GROUPS)))
    (tmp_path / "rollouts").mkdir()
    for number in range(judge.STEPS):
        chosen = groups[number * judge.GROUPS : (number + 1) * judge.GROUPS]
        rows = [{"group": group, "sample": sample} for group in chosen for sample in range(judge.SAMPLES)]
        file = tmp_path / "rollouts" / f"step-{number + 1:06d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [{"step": number + 1, "groups/dropped": 0} for number in range(judge.STEPS)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    faults = judge.group_faults(tmp_path, judge.Subject(tmp_path, tmp_path, "apart", 0))
    assert any(fault in f for f in faults) if fault else faults == []
