"""`whet plugins why` says how a name was found, or why not; single files are seen where a config names them."""

import json
from pathlib import Path
from typing import Any

import pytest

from whet.plugins.registry import load_plugins
from whet_start.registry_option import elsewhere

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


@pytest.fixture
def single(config: Path, tmp_path: Path) -> Path:
    """A config that names a single-file plugin, and is otherwise no good."""
    (tmp_path / "mine.py").write_text(SINGLE)
    path = tmp_path / "single.yaml"
    path.write_text("extends: base.yaml\nnothing: known\n")
    (tmp_path / "base.yaml").write_text("plugins: [./mine.py]\n")
    return path


@pytest.mark.parametrize("name", ["clip", "losses/clip"])
def test_all_about_a_component_that_was_found(alone: Any, offers: Any, site: Path, name: str) -> None:
    done = alone("why", name)
    assert done.returncode == 0, done.stderr
    line = (site / "offers_hooks.py").read_text().splitlines().index("class Clip:")  # the line of its decorator
    assert done.stdout.splitlines() == [
        "losses/clip: A clipped loss.",
        "  offered by  whet-offers 1.0, entry point offers_hooks = offers_hooks",
        "  target      offers_hooks:made: it can be imported",
        f"  keys        offers_hooks.Clip ({site}/offers_hooks.py, line {line})",
    ]


def test_a_distribution_names_all_that_it_offers(alone: Any, offers: Any) -> None:
    found = json.loads(alone("why", "whet-offers", "--json").stdout)["found"]
    assert {f"{one['kind']}/{one['name']}" for one in found} >= {"losses/clip", "algorithms/loop", "loggers/paper"}


def test_a_target_that_cannot_be_imported_is_told(alone: Any, offers: Any, install: Any, site: Path) -> None:
    source = (site / "offers_hooks.py").read_text()
    wrong = source.replace('"clip"', '"bad"').replace('"loop"', '"b"').replace('__name__ + ":made"', '"gone_module:X"')
    install("whet-wrong", {"wrong_hooks": wrong})
    done = alone("why", "bad")
    assert done.returncode == 1
    assert (
        "target      gone_module:X: 'gone_module:X' cannot be imported: ModuleNotFoundError: No module" in done.stdout
    )


def test_a_name_that_is_offered_twice_names_both(alone: Any, offers: Any, install: Any, site: Path) -> None:
    install("whet-again", {"again_hooks": (site / "offers_hooks.py").read_text()}, version="2.5")
    done = alone("why", "clip")
    assert done.returncode == 1
    assert "offered by  whet-again 2.5, entry point again_hooks = again_hooks" in done.stdout
    assert "contested   whet-offers offers it too; choose this one by `use: whet-again/clip`" in done.stdout
    done = alone("why", "whet-again/clip")
    assert done.returncode == 0, done.stdout
    assert "whet-offers 1.0" not in done.stdout


def test_an_unknown_name_gives_near_ones_and_quotes_broken_plugins(alone: Any, offers: Any, install: Any) -> None:
    install("whet-bad", {"bad_hooks": "def deep():\n    return 1 / 0\n\ndeep()\n"})
    install("whet-old", {"old_hooks": ""}, requires="whet>=99")
    done = alone("why", "clyp")
    assert done.returncode == 1
    assert "no usable plugin offers 'clyp'\nnear names: losses/clip (whet-offers)\n" in done.stdout
    assert "whet-bad (plugin 'bad_hooks'): ZeroDivisionError: division by zero (" in done.stdout
    assert "return 1 / 0" in done.stdout, "the traceback's last lines"
    assert "whet-old (plugin 'old_hooks'): it is made for whet>=99" in done.stdout
    assert "`--config FILE` also looks" in done.stdout
    found = json.loads(alone("why", "clyp", "--json").stdout)
    assert found["near"] == ["losses/clip (whet-offers)"]
    assert {broken["distribution"] for broken in found["broken"]} == {"whet-bad", "whet-old"}


def test_a_broken_distribution_is_asked_for_by_its_name(alone: Any, offers: Any, install: Any) -> None:
    install("whet-bad", {"bad_hooks": "1 / 0"})
    install("whet-worse", {"worse_hooks": "1 / 0"})
    done = alone("why", "whet-bad")
    assert done.returncode == 1
    assert "whet-bad (plugin 'bad_hooks')" in done.stdout
    assert "whet-worse (plugin" not in done.stdout


def test_single_files_are_seen_where_a_config_names_them(alone: Any, single: Path, tmp_path: Path) -> None:
    assert alone("why", "mine").returncode == 1
    done = alone("why", "mine", "--config", str(single))
    assert done.returncode == 0, done.stderr
    assert f"  offered by  the single file {tmp_path}/mine.py\n" in done.stdout
    assert f"  target      file:{tmp_path}/mine.py:Mine: it can be imported\n" in done.stdout
    assert done.stdout.endswith("mine.py, line 6)\n")
    assert f"looked at that {single} lists under `plugins:`" in alone("why", "yours", "--config", str(single)).stdout
    found = json.loads(alone("--config", str(single), "--json").stdout)
    assert found["components"]["environments"]["mine"] == f"{tmp_path}/mine.py"


def test_a_single_file_that_is_broken_or_gone_is_a_warning(alone: Any, single: Path, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("plugins: [./mine.py, ./gone.py]\n")
    (tmp_path / "mine.py").write_text("1 / 0\n")
    done = alone("--config", str(single))
    assert done.returncode == 0
    assert "warning: plugins.0: " in done.stderr
    assert f"warning: plugins.1: there is no file '{tmp_path}/gone.py'" in done.stderr
    assert "ZeroDivisionError" in alone("why", "mine", "--config", str(single)).stdout


def test_a_command_of_a_distribution_is_found_and_listed(alone: Any, install: Any, site: Path) -> None:
    info = install("whet-shine", {})
    (info / "METADATA").write_text((info / "METADATA").read_text() + "Summary: Make it shine.\n")
    (info / "entry_points.txt").write_text("[whet.commands]\nshine = shine_cli:shine\n")
    (site / "shine_cli.py").write_text("import click\n@click.command()\ndef shine(): pass")
    for name in ("shine", "commands/shine", "whet-shine"):
        done = alone("why", name)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "commands/shine: Make it shine.\n  offered by  whet-shine\n"
    assert json.loads(alone("--json").stdout)["commands"] == {"shine": "whet-shine"}


def test_only_what_is_not_installed_is_elsewhere(offers: Any, install: Any) -> None:
    assert list(elsewhere(offers, "algorithms/dpo")) == [("algorithms/dpo", "whet-dpo")]
    assert {("algorithms/dpo", "whet-dpo"), ("losses/dpo", "whet-dpo")} <= set(elsewhere(offers, "dpo"))
    assert {owner for _, owner in elsewhere(offers, "whet-dpo")} == {"whet-dpo"}
    install("whet-dpo", {"dpo_hooks": "1 / 0"})
    assert list(elsewhere(load_plugins(), "algorithms/dpo")) == [], "a broken plugin is here"
