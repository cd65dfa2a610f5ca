"""`whet schema` explains every key."""

import json
from typing import Any

import pytest


def test_a_section_is_explained(command: Any) -> None:
    done = command("schema", "rollout")
    assert done.returncode == 0
    assert "max_tokens  an integer  = 256\n    Longest completion of one turn, in tokens.\n" in done.stdout


@pytest.mark.parametrize("name", ["trainer", "backends/trainer"])
def test_a_component_is_explained(command: Any, offers: Any, name: str) -> None:
    done = command("schema", name)
    assert done.stdout.startswith("backends/trainer: A trainer.\n")
    assert "optimizer.lr  a number  = 1.0e-06\n    Learning rate.\n" in done.stdout


def test_without_a_name_everything_is_listed(command: Any, offers: Any) -> None:
    lines = command("schema").stdout.splitlines()
    assert any(line.split() == ["losses/clip", "A", "clipped", "loss."] for line in lines)
    assert any(line.startswith("cluster.deadlines ") for line in lines)


def test_json_holds_the_fields(command: Any, offers: Any) -> None:
    found = json.loads(command("schema", "clip", "--json").stdout)
    assert [field["name"] for field in found["losses/clip"]] == ["low", "high"]
    assert "run" in json.loads(command("schema", "--json").stdout)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rolout", "there is no section or component 'rolout' (did you mean 'rollout'?)"),
        ("trayner", "(did you mean 'trainer'?)"),
        ("losses/clop", "there is no loss 'clop' (did you mean 'clip'?)"),
        ("mine", "a component of a single file is seen with the config that names it: --config FILE"),
        ("algorithm", "algorithm holds one of the algorithms; ask for one of them: "),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(command: Any, offers: Any, name: str, message: str) -> None:
    done = command("schema", name)
    assert done.returncode == 1
    assert message in done.stderr
