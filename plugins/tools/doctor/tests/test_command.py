"""`whet doctor` prints a table of findings, and ends with 1 where one is a failure."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from whet.cli.app import group


def test_a_table_for_people(offers) -> None:
    done = CliRunner().invoke(group, ["doctor"], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 0), done.output
    lines = done.output.splitlines()
    assert lines[0].split() == ["check", "found", "what", "to", "change"]
    assert any(line.split()[:2] == ["ok", "python"] for line in lines)
    assert lines[-1].endswith(" 0 failures")


def test_json_for_programs_and_the_code_for_scripts(good: Path) -> None:
    done = CliRunner().invoke(group, ["doctor", str(good), "run.sed=1", "--json"], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 1), done.output
    found = json.loads(done.output)
    assert found["ok"] is False
    failed = [check for check in found["checks"] if check["status"] == "fail"]
    assert [(check["name"], check["found"]) for check in failed] == [
        ("config", "command line: run.sed: unknown key (did you mean 'seed'?)")
    ]


def test_it_is_light_and_sees_the_limits_of_its_process(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2048));"
        "from whet.cli.app import group; code = group.main(standalone_mode=False);"
        "print(code, [m for m in ('torch', 'ray', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    found = json.loads(done.stdout.rpartition("\n0 []")[0])
    (limits,) = [check for check in found["checks"] if check["name"] == "open files"]
    assert (limits["status"], limits["change"]) == ("warn", "ulimit -n 2048")


def test_its_exit_code_is_that_of_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "whet", "doctor", "none.yaml", "--json"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (1, False), done.stderr


@pytest.mark.parametrize(("path", "today"), [("plan.doctor", "examine"), ("plan.checks", "checks")])
def test_the_paths_that_it_had_in_core_lead_here_with_a_warning(path: str, today: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"whet.{path} has moved to whet_doctor.{today}"):
        old = importlib.import_module(f"whet.{path}")
    assert old is importlib.import_module(f"whet_doctor.{today}")
