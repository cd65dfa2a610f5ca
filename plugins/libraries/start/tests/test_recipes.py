"""Recipes in the packages of plugins."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from whet.errors import ConfigError
from whet.plugins.registry import Registry, load_plugins
from whet_start.cli import recipe as command
from whet_start.recipes import recipe, recipes, with_bases

WARM = """\
# A warm start: nothing is sharp yet. More follows.
run: {folder: runs/sums/warm, steps: 60}
model: {path: runs/sums/start}
algorithm: loop
backend: trainer
data: {train: [{path: runs/sums/start/train.jsonl}]}
"""
SHARP = """\
# Sharper.
run: {folder: runs/sums/sharp, steps: 20}
model: {path: runs/sums/warm/model}
algorithm: loop
backend: trainer
data: {train: [{path: runs/sums/start/train.jsonl}]}
"""
Kit = Callable[..., Registry]


@pytest.fixture
def kit(site: Path, install: Callable[..., Path]) -> Kit:
    """Install a package with recipes; return the registry."""

    def make(name: str = "kit", **files: str) -> Registry:
        package = site / name
        (package / "recipes").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "hooks.py").touch()
        for stem, text in (files or {"warm": WARM, "sharp": SHARP}).items():
            (package / "recipes" / f"{stem}.yaml").write_text(text)
        info = install(f"whet-{name}", {})
        (info / "entry_points.txt").write_text(f"[whet]\n{name} = {name}.hooks\n")
        return load_plugins()

    return make


def test_recipes_of_installed_packages_are_found_with_what_they_are(kit: Kit) -> None:
    found = recipes(kit())
    assert list(found) == ["sharp", "warm"]
    assert found["warm"].about == "A warm start: nothing is sharp yet"
    assert (found["warm"].distribution, found["warm"].version) == ("whet-kit", "1.0")


def test_a_recipe_comes_with_what_it_extends(kit: Kit, site: Path) -> None:
    registry = kit(base="# It.\nrun: {steps: 1}\n", child="extends: base.yaml\nrun: {steps: 2}\n")
    assert [path.name for path in with_bases(recipe(registry, "child"))] == ["child.yaml", "base.yaml"]
    (site / "kit" / "recipes" / "base.yaml").unlink()
    with pytest.raises(ConfigError, match=r"whet-kit ships 'child' without base\.yaml, which it extends"):
        with_bases(recipe(registry, "child"))


def test_a_recipe_that_does_not_fit_on_the_disk_leaves_nothing(kit: Kit, tmp_path: Path) -> None:
    kit()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(WARM), before[1]))
    try:
        done = CliRunner().invoke(command, ["warm", "--into", str(tmp_path / "in")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 1
    assert f"cannot write {tmp_path / 'in' / 'warm.yaml'}: File too large" in done.stderr
    assert not list((tmp_path / "in").iterdir())


def test_an_unknown_recipe_gives_the_nearest(kit: Kit) -> None:
    registry = kit()
    with pytest.raises(ConfigError, match="there is no recipe 'warmm' \\(did you mean 'warm'\\?\\)"):
        recipe(registry, "warmm")


def test_a_recipe_of_a_plugin_that_is_not_installed_gives_the_command_that_installs_it(kit: Kit) -> None:
    with pytest.raises(ConfigError, match="the recipe 'learn-dpo' comes with whet-dpo: pip install whet-dpo"):
        recipe(kit(), "learn-dpo")


def test_the_list_has_the_recipes_that_other_plugins_would_bring(site: Path) -> None:
    done = CliRunner().invoke(command, [])
    assert done.exit_code == 0
    assert "no installed plugin ships a recipe" in done.output
    assert "pip install whet-sft: learn-moe-sft, learn-sft" in done.output


def test_the_list_has_the_recipes_of_installed_plugins(kit: Kit) -> None:
    kit()
    (line,) = (line for line in CliRunner().invoke(command, []).output.splitlines() if line.startswith("warm"))
    assert line.split() == ["warm", "whet-kit", *["A", "warm", "start:", "nothing", "is", "sharp", "yet"]]
