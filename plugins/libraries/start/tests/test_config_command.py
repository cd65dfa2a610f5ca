"""`whet config explain` says where values come from."""

import json
from pathlib import Path
from typing import Any

import yaml


def test_a_key_is_explained(command: Any, config: Path) -> None:
    config.write_text(config.read_text() + "rollout:\n  max_tokens: 8\n")
    line = len(config.read_text().splitlines())
    done = command("config", "explain", "it.yaml", "rollout.max_tokens")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "rollout.max_tokens = 8",
        "    Longest completion of one turn, in tokens.",
        "    an integer, at least 1, at most 100000000; a key of the section `rollout`",
        f"from it.yaml:{line}",
        "replaces 256 (default)",
        f"to change it: it.yaml:{line}, or rollout.max_tokens=VALUE on the command line",
    ]
    done = command("config", "explain", "it.yaml", "rollout.max_tokens", "rollout.max_tokens=9")
    assert done.stdout.splitlines()[3:5] == [
        "from the override 'rollout.max_tokens=9'",
        f"replaces 8 (it.yaml:{line})",
    ]


def test_without_a_key_every_value_has_its_source(command: Any, config: Path) -> None:
    done = command("config", "explain", "it.yaml", "run.seed=3")
    assert done.exit_code == 0, done.output
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert ["run.seed", "3", "the override 'run.seed=3'"] in rows
    assert ["run.keep", "2", "default"] in rows
    assert any(row[:2] == ["algorithm.use", "loop"] and row[2].startswith("it.yaml:") for row in rows)
    found = json.loads(command("config", "explain", "it.yaml", "--json").stdout)
    assert [setting["key"] for setting in found] == [row[0] for row in rows]
    assert found[0]["origins"][0]["kind"] == "file"


def test_a_section_lists_its_keys(command: Any, config: Path) -> None:
    done = command("config", "explain", "it.yaml", "backend")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["backend.use", "backend.optimizer.lr"]


def test_what_is_printed_is_read_as_it_was_meant(command: Any, config: Path) -> None:
    words = ["run.folder='a  b'", "rollout.stop=[\"\\n\", 'x: y']"]
    done = command("config", "explain", "it.yaml", "rollout.stop", *words)
    assert yaml.safe_load(done.stdout.splitlines()[0].partition(" = ")[2]) == ["\n", "x: y"]
    done = command("config", "explain", "it.yaml", "run.folder", *words)
    assert done.stdout.startswith("run.folder = a  b\n")


def test_an_item_of_a_list_is_meant_by_its_name_too(command: Any, config: Path) -> None:
    done = command("config", "explain", "it.yaml", "loggers.screen.use")
    assert done.stdout.splitlines()[0] == "loggers.0.use = screen", done.output


def test_problems_and_unknown_keys_are_errors(command: Any, config: Path) -> None:
    for words in (["run.sed"], ["run.seed", "run.stesp=3"]):
        done = command("config", "explain", "it.yaml", *words)
        assert done.exit_code == 1
        assert "(did you mean 'run.seed'?)" in done.output or "(did you mean 'steps'?)" in done.output
        assert "Traceback" not in done.output
    assert command("config", "explain", "it.yaml", "run.seed", "run.keep").exit_code == 2
