"""`whet recipe` as people type it, and what core says where it is alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from whet.plugins.catalog import catalog
from whet.plugins.registry import load_plugins
from whet_start.recipes import recipes

ROOT = Path(__file__).parents[1]
WITH = """
import whet.cli.commands, whet.plugins.registry
found = [one for one in whet.plugins.registry.distributions() if one.name in {names}]
entries = [entry for one in found for entry in one.entry_points]
whet.plugins.registry.distributions = lambda: found
whet.cli.commands.entry_points = lambda group: [entry for entry in entries if entry.group == group]
from whet.cli import main
main()
"""
ALONE = WITH.format(names=[])
"""The command line where no plugin is installed."""
WITH_START = WITH.format(names=["whet-start"])
"""The same with whet-start alone, which brings `whet plugins`."""


def alone(*arguments: str, folder: Path, code: str = ALONE) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60, check=False)


def test_core_alone_lists_what_there_is_to_install(tmp_path):
    done = alone("plugins", folder=tmp_path, code=WITH_START)
    assert done.returncode == 0, done.stderr
    assert "No plugin is installed" in done.stdout
    assert all(f"pip install 'whet[{bundle}]'" in done.stdout for bundle in catalog().bundles)
    for name, about in catalog().distributions.items():
        assert f"  {name} " in done.stdout
        assert about.split()[-1] in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plugins", "why", "arithmetic"], "whet-env-math offers environments/arithmetic, and is not installed: pip"),
        (["plugins", "why", "whet-hf"], "whet-hf offers generators/hf, and is not installed: pip install whet-hf"),
        (
            ["plugins", "why", "report"],
            "whet-report offers the command 'report', and is not installed: pip install whet-r",
        ),
        (["plugins", "why", "grpoo"], "near names: algorithms/grpo (whet-grpo, not installed)"),
        (["check", str(ROOT / "recipes" / "learn-dpo.yaml")], "\nall that is not installed: pip install 'whet[dpo]'"),
    ],
)
def test_core_alone_says_who_offers_a_name_and_how_to_install_it(tmp_path, arguments, said):
    done = alone(*arguments, folder=tmp_path, code=WITH_START if arguments[0] == "plugins" else ALONE)
    assert done.returncode == 1
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(catalog().commands))
def test_core_alone_says_who_offers_a_command_and_how_to_install_it(tmp_path, name):
    done = alone(name, folder=tmp_path)
    owner = catalog().commands[name]
    assert done.returncode == 2
    assert f"there is no command '{name}' here; it is offered by {owner}: pip install {owner}" in done.stderr


def test_every_recipe_is_listed_and_written_so_that_it_loads(whet, tmp_path):
    found = recipes(load_plugins())
    listed = whet("recipe", folder=tmp_path).output
    assert set(found) == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert all(name in listed for name in found)


@pytest.mark.parametrize("name", ["learn-ppo", "gsm8k-sft"])
def test_a_recipe_is_written_with_its_bases_and_says_what_is_to_be_put_in(whet, tmp_path, name):
    done = whet("recipe", name, "--into", "mine", folder=tmp_path)
    assert done.code == 0, done.errors
    written = sorted(path.name for path in (tmp_path / "mine").iterdir())
    assert written == (["learn-grpo.yaml", "learn-ppo.yaml"] if name == "learn-ppo" else ["gsm8k-sft.yaml"])
    text = (tmp_path / "mine" / f"{name}.yaml").read_text()
    assert text.startswith(f"# Written by `whet recipe {name}`, from whet-")
    original = (ROOT / "recipes" / f"{name}.yaml").read_text()
    assert yaml.safe_load(text) == yaml.safe_load(original)
    assert text.endswith(original)
    assert ("  model.path=models/start-0/model\n" in done.output) == (name == "learn-ppo")
    assert "Qwen" not in done.output, "a model of the hub needs nobody to put it in"
    again = whet("recipe", name, "--into", "mine", folder=tmp_path)
    assert "exists already" in again.error


def test_two_recipes_with_one_base_lie_side_by_side(whet, tmp_path):
    for name in ("learn-ppo", "learn-dapo"):
        assert whet("recipe", name, folder=tmp_path).code == 0
    assert {path.stem for path in tmp_path.iterdir()} == {"learn-ppo", "learn-dapo", "learn-grpo"}
