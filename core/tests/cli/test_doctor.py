"""`whet doctor` prints a table of findings, and ends with 1 where one is a failure."""

import json
from pathlib import Path
from typing import Any


def test_a_table_for_people(command: Any) -> None:
    done = command("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["check", "found", "what", "to", "change"]
    assert any(line.split()[:2] == ["ok", "python"] for line in lines)
    assert lines[-1].endswith(" 0 failures")


def test_json_for_programs_and_the_code_for_scripts(command: Any, config: Path) -> None:
    done = command("doctor", str(config), "run.sed=1", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["ok"] is False
    failed = [check for check in found["checks"] if check["status"] == "fail"]
    assert [(check["name"], check["found"]) for check in failed] == [
        ("config", "command line: run.sed: unknown key (did you mean 'seed'?)")
    ]


def test_it_is_light_and_sees_the_limits_of_its_process(command: Any) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2048));"
        "from whet.cli.app import group; code = group.main(standalone_mode=False);"
        "print(code, [m for m in ('torch', 'ray', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = command("doctor", "--json", code=code)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    found = json.loads(done.stdout.rpartition("\n0 []")[0])
    (limits,) = [check for check in found["checks"] if check["name"] == "open files"]
    assert (limits["status"], limits["change"]) == ("warn", "ulimit -n 2048")
