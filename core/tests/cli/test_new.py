"""`whet new environment` writes a package that works as it stands."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def package(command: Any, tmp_path: Path) -> Path:
    done = command("new", "environment", "word-games")
    assert done.returncode == 0, done.stderr
    return tmp_path / "whet-env-word-games"


def test_the_package_is_complete(package: Path) -> None:
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    source = "src/whet_env_word_games"
    assert files == {
        "pyproject.toml", "README.md", "CHANGELOG.md", ".gitignore", "recipes/word-games.yaml",
        "tests/test_whet_env_word_games.py", f"{source}/__init__.py", f"{source}/py.typed", f"{source}/hooks.py",
        f"{source}/config.py", f"{source}/tasks.py", f"{source}/environment.py",
    }  # fmt: skip
    assert not any("$" in path.read_text() for path in package.rglob("*") if path.is_file())
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == "whet-env-word-games"
    assert project["entry-points"]["whet"] == {"env-word-games": "whet_env_word_games.hooks"}


def test_its_own_tests_pass(package: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(package / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package)],
        capture_output=True, text=True, cwd=package, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_once_installed_its_environment_is_found(package: Path, site: Path, command: Any) -> None:
    info = site / "whet_env_word_games-0.1.0.dist-info"
    info.mkdir()
    requires = tomllib.loads((package / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: whet-env-word-games\nVersion: 0.1.0\n{wanted}")
    (info / "entry_points.txt").write_text("[whet]\nenv-word-games = whet_env_word_games.hooks\n")
    (package / "src" / "whet_env_word_games").rename(site / "whet_env_word_games")
    done = command("schema", "environments/word-games")
    assert done.stdout.startswith("environments/word-games: Asks for the larger of two numbers.")
    assert "largest  an integer  = 99\n    The largest number that is asked about." in done.stdout


def test_linters_have_nothing_to_say(package: Path) -> None:
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.exists():
        pytest.skip("ruff is not installed beside this Python")
    settings = ["--isolated", "--no-cache", "--line-length=120"]
    for arguments in (["check", "--select=E,F,W,I,B,UP,N,SIM,RUF"], ["format", "--check", "--diff"]):
        done = subprocess.run(
            [ruff, *arguments, *settings, "."], capture_output=True, text=True, cwd=package, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Word", "a b", "../x", "1st", "a_b", "-x", "a-", ""])
def test_other_names_are_refused(command: Any, name: str, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    done = command("new", "environment", "--", name)
    assert done.returncode == 2
    assert set(tmp_path.iterdir()) == before


def test_a_folder_that_exists_is_left_alone(package: Path, command: Any) -> None:
    (package / "README.md").write_text("mine")
    done = command("new", "environment", "word-games")
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert (package / "README.md").read_text() == "mine"
