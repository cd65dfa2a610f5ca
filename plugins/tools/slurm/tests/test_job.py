"""The end of a job is what Slurm says it is, and a run keeps to it."""

import json
import time
from datetime import datetime

import pytest
import yaml

from whet.run import compose
from whet_slurm.job import end_of_job, end_shown

SHOWN = """JobId=4242 JobName=whet
   UserId=someone(1000) GroupId=someone(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   RunTime=00:12:31 TimeLimit=04:00:00 TimeMin=N/A
   SubmitTime=2026-11-25T09:59:10 EligibleTime=2026-11-25T09:59:10
   StartTime=2026-11-25T10:00:00 EndTime={end} Deadline=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-25T10:00:00 Scheduler=Main
"""
"""As the manual of scontrol shows it."""


@pytest.fixture
def slurm(tmp_path):
    """Return a function that makes an environment with a `scontrol` of these words."""

    def make(words: str, code: int = 0, **variables: str) -> dict[str, str]:
        program = tmp_path / "scontrol"
        (tmp_path / "shown").write_text(words)
        program.write_text(
            f'#!/bin/sh\n[ "$1 $2 $3" = "show job 4242" ] || exit 9\ncat {tmp_path}/shown\nexit {code}\n'
        )
        program.chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "4242", **variables}

    return make


def test_recent_versions_state_the_end(slurm):
    end = int(time.time()) + 3600
    stated = {"SLURM_JOB_END_TIME": str(end)}
    assert end_of_job(stated) == end
    assert end_of_job(slurm(SHOWN.format(end="2099-11-25T14:00:00"), **stated)) == end


def test_a_stated_end_that_is_past_is_of_another_job(slurm, capsys):
    past = {"SLURM_JOB_END_TIME": str(int(time.time()) - 45)}
    assert end_of_job(past) is None
    assert "is past, so it is of another job" in capsys.readouterr().err
    found = end_of_job(slurm(SHOWN.format(end="2099-11-25T14:00:00"), **past))
    assert found == datetime(2099, 11, 25, 14).timestamp()


def test_older_versions_are_asked(slurm):
    found = end_of_job(slurm(SHOWN.format(end="2099-11-25T14:00:00")))
    assert found == datetime(2099, 11, 25, 14).timestamp()  # in local time, as Slurm writes it


def test_an_end_that_scontrol_shows_and_that_is_past_is_not_used(slurm, capsys):
    assert end_of_job(slurm(SHOWN.format(end="2025-11-25T14:00:00"))) is None
    assert "job 4242 ended 2025-11-25T14:00:00, which is past" in capsys.readouterr().err


def test_the_first_task_of_an_array_has_its_own_end(slurm):
    other = SHOWN.replace("JobId=4242", "JobId=4244 ArrayJobId=4242 ArrayTaskId=1")
    own = SHOWN.replace("JobId=4242", "JobId=4242 ArrayJobId=4242 ArrayTaskId=2")
    shown = "\n".join([other.format(end="2098-11-25T14:00:00"), own.format(end="2099-11-25T14:00:00")])
    assert end_of_job(slurm(shown)) == datetime(2099, 11, 25, 14).timestamp()


@pytest.mark.parametrize("end", ["Unknown", "N/A", "None"])
def test_a_job_without_a_limit_has_no_end(slurm, end):
    assert end_of_job(slurm(SHOWN.format(end=end))) is None
    assert end_shown("nothing", "4242") is None


def test_outside_of_a_job_there_is_none(slurm):
    environment = slurm(SHOWN.format(end="2099-11-25T14:00:00"))
    del environment["SLURM_JOB_ID"]
    assert end_of_job(environment) is None
    assert end_of_job({"PATH": "/nowhere", "SLURM_JOB_ID": "4242"}) is None


def test_a_scontrol_that_fails_is_named_and_the_run_goes_on(slurm, capsys):
    assert end_of_job(slurm("slurm_load_jobs error: Invalid job id specified", 1)) is None
    assert "when Slurm ends job 4242 is unknown" in capsys.readouterr().err


def test_a_run_ends_before_its_job_and_goes_on_in_the_next(tmp_path, tiny_model_folder, monkeypatch, capsys):
    rows = [{"prompt": f"What is {n}?", "completion": f"{n}."} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"folder": str(tmp_path / "run"), "steps": 3, "export": False},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "sft", "batch_size": 2},
        "backend": {"use": "fsdp2"},
        "data": {"train": [{"path": str(tmp_path / "rows.jsonl")}]},
        "cluster": {"workers": "inline"},
        "loggers": [],
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))  # less than a first save may take
    outcome = compose.run(tmp_path / "it.yaml")
    assert (outcome.steps, outcome.finished, outcome.stopped_by) == (1, False, 15)
    assert "Slurm ends job 4242 in " in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 36_000))
    outcome = compose.run(tmp_path / "it.yaml")
    assert (outcome.steps, outcome.finished) == (3, True)
