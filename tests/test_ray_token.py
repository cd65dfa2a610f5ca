"""Ray's token does not reach what a run's environment starts, and Ray works with it all the same."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_programs_of_an_environment_do_not_see_it_also_after_a_worker_was_replaced(tmp_path, small_run, whose):
    seen = tmp_path / "seen.jsonl"
    config = small_run(
        tmp_path,
        run={"folder": str(tmp_path / "run"), "steps": 4},
        plugins=[str(HERE / name) for name in ("looking.py", "striking.py")],
        environments=[
            {"use": "looking", "file": str(seen)},
            {"use": "striking", "victim": "generator-1", "answers": [6]},
        ],
        cluster={
            "launcher": "ray", "colocate": [], "ranks": {"generator": 2}, "threads": {"backend": 1, "generator": 1},
        },
    )  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    if whose == "theirs":
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [sys.executable, "-m", "whet", "run", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "restarted" in (tmp_path / "run/journal.jsonl").read_text()
    rows = [json.loads(line) for line in seen.read_text().splitlines()]
    played = [row for row in rows if row["when"] == "played"]
    assert len(played) > 10
    assert [row for row in rows if "RAY_AUTH_TOKEN" in row] == []
    assert [row for row in played if "RAY_AUTH_TOKEN_PATH" in row] == []
