"""`whet check` says what is wrong with a config, and what its run would do, without anything heavy."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner

from whet.cli.check import check
from whet.plugins.features import FORECAST


def test_a_good_config_is_planned(command: Any, config: Path) -> None:
    done = command("check", str(config))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("structure: ok\nproblems: none\nplan:\n")
    assert "backend: trainer" in done.stdout


def test_it_imports_no_torch_transformers_or_ray(command: Any, config: Path) -> None:
    code = (
        "import sys; from whet.cli.app import group; code = group.main(standalone_mode=False);"
        "print(code, [m for m in ('torch', 'ray', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = command("check", str(config), code=code)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_the_plan_is_json_where_it_is_asked_for(command: Any, config: Path) -> None:
    found = json.loads(command("check", str(config), "--json").stdout)
    assert (found["ok"], found["problems"]) == (True, [])
    assert found["plan"]["roles"][0]["component"] == "trainer"


def test_problems_are_a_line_each(command: Any, config: Path) -> None:
    done = command("check", str(config), "run.stesp=1", "run.seed=x")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Error: 2 problems in the config",
        "  command line: run.stesp: unknown key (did you mean 'steps'?)",
        "  command line: run.seed: wanted an integer, found the text 'x'",
    ]
    found = command("check", str(config), "run.stesp=1", "run.seed=x", "--json")
    assert found.returncode == 1
    problems = [line.strip() for line in done.stderr.splitlines()[1:]]
    assert json.loads(found.stdout) == {"ok": False, "problems": problems, "warnings": [], "plan": None}


def test_a_machine_that_is_described_needs_the_distribution_that_reads_it(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.plugins.features.FORECAST", evolve(FORECAST, group="whet.nobody"))
    for further in ((), ("--json",)):
        done = CliRunner().invoke(check, [str(config), "--machine", "8xH100", *further])
        told = "Error: no machine but this one can be planned for; pip install whet-memory\n"
        assert (done.exit_code, done.stdout, done.stderr) == (1, "", told)


def test_data_files_that_are_not_there_are_problems(command: Any, config: Path) -> None:
    done = command("check", str(config), "data.train.0.path=gone.jsonl", "data.validation=[{path: .}]")
    assert done.returncode == 1
    held_out = "wanted one of `validation` and `test` to validate on, or a key `split` that names the split"
    assert done.stderr.splitlines() == [
        "Error: 2 problems in the config",
        "  command line: data.train.0.path: there is no file 'gone.jsonl'",
        f"  command line: data.validation.0.path: . has the splits data; {held_out}",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'data.jsonl' holds no record"),
        ("[1]\n[2]\n", "none of the first 2 records can be used; data.jsonl:1: a list, wanted an object with named"),
    ],
)
def test_the_first_records_of_data_files_are_read(
    command: Any, config: Path, tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    done = command("check", str(config))
    assert done.returncode == 1
    assert re.search(rf"Error: .*it\.yaml:\d+: data\.train\.0\.path: {re.escape(problem)}", done.stderr)


def test_one_bad_record_among_good_ones_is_left_to_the_run(command: Any, config: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('[1]\n{"text": "a"}\n')
    assert command("check", str(config)).returncode == 0


def test_a_broken_plugin_is_a_warning(command: Any, config: Path, install: Any) -> None:
    install("whet-bad", {"bad_hooks": "1 / 0"})
    done = command("check", str(config))
    assert done.returncode == 0
    assert "warning: not usable: whet-bad (plugin 'bad_hooks'): ZeroDivisionError" in done.stderr


def test_a_broken_plugin_is_quoted_where_it_might_be_missing(command: Any, config: Path, install: Any) -> None:
    install("whet-bad", {"bad_hooks": "1 / 0"})
    done = command("check", str(config), "backend=other")
    assert done.returncode == 1
    assert "there is no backend 'other'" in done.stderr
    assert "whet-bad (plugin 'bad_hooks'): ZeroDivisionError: division by zero" in done.stderr
