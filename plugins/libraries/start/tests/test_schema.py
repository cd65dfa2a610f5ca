"""`whet schema` explains every key."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from whet_start.schema import schema

SINGLE = '''
from attrs import frozen
from whet import hookimpl
from whet.component import Component

@frozen
class Mine:
    """Mine alone."""
    depth: int = 1
    """How deep."""

@hookimpl
def whet_environments():
    return [Component("mine", Mine, f"{__name__}:Mine")]
'''


def test_a_section_is_explained(command: Any) -> None:
    done = command("schema", "rollout")
    assert done.exit_code == 0, done.output
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
        ("dpo", "no installed plugin has 'dpo'; it is offered by whet-dpo: pip install whet-dpo"),
        ("algorithms/dpo", "there is no algorithm 'dpo'; it is offered by whet-dpo: pip install whet-dpo"),
        ("mine", "a component of a single file is seen with the config that names it: --config FILE"),
        ("algorithm", "algorithm holds one of the algorithms; ask for one of them: "),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(command: Any, offers: Any, name: str, message: str) -> None:
    done = command("schema", name)
    assert done.exit_code == 1
    assert message in done.output


def test_of_a_name_that_is_offered_twice_the_one_that_is_meant_is_explained(
    command: Any, offers: Any, install: Any, site: Path
) -> None:
    install("whet-again", {"again_hooks": (site / "offers_hooks.py").read_text()})
    done = command("schema", "whet-again/clip")
    assert done.stdout.startswith("losses/whet-again/clip: A clipped loss.\n")
    assert "whet-offers" not in done.stdout


def test_single_files_are_seen_where_a_config_names_them(command: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SINGLE)
    (tmp_path / "single.yaml").write_text("plugins: [./mine.py]\n")
    done = command("schema", "mine", "--config", "single.yaml")
    assert done.stdout.startswith("environments/mine: Mine alone.\n\ndepth  an integer  = 1\n    How deep.")
    assert command("schema", "mine").exit_code == 1


def test_the_path_that_it_had_in_core_leads_here_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"whet\.cli\.schema has moved to whet_start\.schema"):
        old = importlib.import_module("whet.cli.schema")
    assert old.schema is schema
