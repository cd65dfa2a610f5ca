"""Environments are made of what is installed here, recorded, and used by name; what fails leaves nothing behind."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import whet
from whet.errors import WhetError
from whet_venv import venvs
from whet.runtime.interpreters import environments, find, probe
from whet_venv.cli import env
from whet_venv.venvs import Recipe, as_here, create, listed, recipe_of, remove
from whet_testing.environments import make_wheels

PLUGIN = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "whet-small"
version = "1.2"
dependencies = ["whet"]
[project.entry-points.whet]
small = "whet_small.hooks"
""",
    "src/whet_small/__init__.py": "",
    "src/whet_small/hooks.py": "",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHET_ENVIRONMENTS", str(tmp_path / "environments"))
    return tmp_path / "environments"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pip find what core needs, and what builds packages, without a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(make_wheels(["whet", "hatchling", "editables"], tmp_path / "here")))


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The source of a plugin."""
    for name, text in PLUGIN.items():
        (tmp_path / "small" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "small" / name).write_text(text)
    return tmp_path / "small"


@pytest.mark.slow
def test_an_environment_is_made_recorded_listed_and_removed(tmp_path: Path, offline: None, plugin: Path) -> None:
    constraints = tmp_path / "tested.txt"
    constraints.write_text(f"pluggy=={metadata.version('pluggy')}\n")
    said: list[str] = []
    recipe = Recipe((str(plugin), "whet", "pluggy"), constraints=constraints, remove=("rich",))
    record = create("small", recipe, tool="pip", say=said.append)
    assert listed() == [{**record, "folder": str(environments() / "small")}]
    assert record == json.loads((environments() / "small" / "whet-environment.json").read_text())
    assert (record["name"], record["whet"], record["made_with"]) == ("small", whet.__version__, "pip")
    assert record["packages"]["whet-small"] == "1.2"
    assert "rich" not in record["packages"]
    assert record["packages"]["pluggy"] == metadata.version("pluggy")
    assert (environments() / "small" / "constraints.txt").read_text() == constraints.read_text()
    assert [command[1:4] for command in record["commands"]] == [
        ["-m", "venv", str(environments() / "small")], ["-m", "pip", "install"], ["-m", "pip", "uninstall"],
    ]  # fmt: skip
    assert any("pip install -c" in line and "install.log" in line for line in said)
    found = probe(find("small"), distributions=["pluggy"])
    assert (found.whet, found.versions["whet-small"]) == (whet.__version__, "1.2")
    with pytest.raises(WhetError, match="there is an environment 'small' already"):
        create("small", recipe, tool="pip", say=said.append)
    remove("small")
    assert listed() == []


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/bin/false", r"`/bin/false -m venv .*` failed"),
        ("/no/python", "/no/python failed: .*No such file"),
        (sys.executable, "No matching distribution found for whet-that-nobody-wrote"),
    ],
)
def test_what_cannot_be_made_leaves_nothing_and_quotes_the_tool(
    python: str, words: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    monkeypatch.setattr(venvs, "as_here", lambda name: [] if name == "whet" else [name])
    with pytest.raises(WhetError, match=words):
        create("it", Recipe(("whet-that-nobody-wrote",)), python=python, tool="pip", say=lambda text: None)
    assert not (home / "it").exists()
    assert listed() == []


@pytest.mark.parametrize("name", ["../x", "", "A", "-x", ".lock"])
def test_a_name_is_a_word(name: str) -> None:
    with pytest.raises(WhetError, match="is no name for an environment"):
        create(name, Recipe(()))
    with pytest.raises(WhetError, match="there is no environment"):
        remove(name)


def test_what_another_process_works_at_is_left_alone(home: Path) -> None:
    home.mkdir()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(home / ".it.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(WhetError, match="another process works at the environment 'it'"):
            create("it", Recipe(()))
        other.kill()


def test_one_that_is_not_finished_is_listed_as_that_and_can_be_removed(home: Path) -> None:
    (home / "half" / "bin").mkdir(parents=True)
    (home / "half" / venvs.LOG).touch()
    assert listed() == [{"name": "half", "folder": str(home / "half")}]
    assert "not finished" in CliRunner().invoke(env, ["list"]).output
    remove("half")
    assert not (home / "half").exists()


def test_a_plugin_says_what_its_environment_needs(install: Any, site: Path) -> None:
    install("whet-engine", {"engine_package.hooks": ""})
    (site / "engine_package").mkdir()
    (site / "engine_package" / "__init__.py").touch()
    assert recipe_of("whet-engine") == Recipe(("whet-engine",))
    (site / "engine_package" / "environment.toml").write_text(
        "[cpu]\ninstall = ['engine-cpu==2']\nconstraints = 'cpu.txt'\nremove = ['vision']\n"
        "[gpu]\ninstall = ['engine']\n"
    )
    cpu = Recipe(("whet-engine",), ("engine-cpu==2",), site / "engine_package" / "cpu.txt", ("vision",))
    assert recipe_of("whet-engine") == recipe_of("whet-engine", "cpu") == cpu
    assert recipe_of("whet-engine", "gpu").install == ("engine",)
    with pytest.raises(WhetError, match="whet-engine has no variant 'tpu' of its environment, only cpu, gpu"):
        recipe_of("whet-engine", "tpu")
    with pytest.raises(WhetError, match="there is no file of constraints"):
        create("engine", cpu)
    assert recipe_of("./some/folder") == Recipe(("./some/folder",)), "what is not installed here says nothing"


def test_what_is_installed_here_is_installed_there_in_the_same_way(install: Any) -> None:
    info = install("whet-engine", {"engine_hooks": ""}, version="2.5")
    assert as_here("whet-engine[cpu]") == ["whet-engine[cpu]==2.5"]
    for source, words in [
        ('{"url": "file:///a%20b", "dir_info": {"editable": true}}', ["-e", "/a b[cpu]"]),
        ('{"url": "file:///a", "dir_info": {}}', ["/a[cpu]"]),
        ('{"url": "https://x/whet.zip"}', ["whet-engine[cpu]==2.5"]),
    ]:
        (info / "direct_url.json").write_text(source)
        assert as_here("whet-engine[cpu]") == words
    for word in ("whet-engine>=3", "whet-nobody", "./folder", "a b", "numpy"):
        assert as_here(word) == [word], "as it was asked for"


def test_a_folder_of_somebody_else_is_left_alone(home: Path) -> None:
    (home / "mine").mkdir(parents=True)
    (home / "mine" / "notes.txt").write_text("mine")
    for act in (lambda: create("mine", Recipe(())), lambda: remove("mine")):
        with pytest.raises(WhetError, match="was not made by `whet env create`"):
            act()
    said = CliRunner().invoke(env, ["list"]).output
    assert "not made by `whet env create`" in said
    assert "not finished" not in said
    assert (home / "mine" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("record", ['{"name": "half", "ma', "[]"])
def test_a_damaged_record_is_that_of_an_environment_that_is_not_finished(home: Path, record: str) -> None:
    (home / "half").mkdir(parents=True)
    (home / "half" / venvs.RECORD).write_text(record)
    assert listed() == [{"name": "half", "folder": str(home / "half")}]
