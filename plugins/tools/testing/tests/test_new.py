"""`whet new KIND` writes packages that work as they stand, and together."""

import ast
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import frozen
from click.testing import CliRunner

from whet.component import KINDS
from whet_testing.new import STARTS, new

FILES = {"pyproject.toml", "README.md", "CHANGELOG.md", ".gitignore"}


@frozen
class Packages:
    """A package of each kind, named after it."""

    folders: Mapping[str, Path]
    environment: Mapping[str, str]
    """Of processes that see them all as installed."""

    def run(self, *command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
        """Run a command of Python in a folder."""
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, cwd=folder, env={**self.environment},
            timeout=280, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    into = tmp_path_factory.mktemp("new")
    site = into / "site"
    folders = {}
    for word, start in STARTS.items():
        done = CliRunner().invoke(new, [word, f"my-{word}", "--into", str(into)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        folders[word] = into / f"whet-{start.prefix}my-{word}"
        install(folders[word], site)
    paths = [str(site), *(str(folder / "src") for folder in folders.values())]
    return Packages(folders, {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"})


def install(package: Path, site: Path) -> None:
    """Write the metadata that pip would write for an editable installation."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    requires = "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"])
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{requires}"
    (info / "METADATA").write_text(about)
    entries = "".join(f"{name} = {module}\n" for name, module in project["entry-points"]["whet"].items())
    (info / "entry_points.txt").write_text(f"[whet]\n{entries}")


def test_every_kind_has_one() -> None:
    assert {start.kind for start in STARTS.values()} == {*KINDS}


@pytest.mark.parametrize("word", ["environment", "algorithm"])
def test_the_recipe_of_a_package_is_written_where_it_is_wanted(packages: Packages, tmp_path: Path, word: str) -> None:
    done = packages.run("-m", "whet", "recipe", f"my-{word}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / f"my-{word}.yaml").read_text()
    assert f"from {packages.folders[word].name} 0.1.0" in text
    assert f"my-{word}" in yaml.safe_dump(yaml.safe_load(text))


@pytest.mark.parametrize("word", STARTS)
def test_a_package_is_complete(packages: Packages, word: str) -> None:
    package = packages.folders[word]
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    module = package.name.replace("-", "_")
    names = ("__init__", "hooks", "config")
    source = {f"src/{module}/{name}.py" for name in names}
    assert files >= {*FILES, *source, f"src/{module}/py.typed", f"tests/test_{module}.py"}
    written = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert not any("$" in path.read_text() for path in written)
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == package.name
    assert list(project["entry-points"]["whet"].values()) == [f"{module}.hooks"]


CONCEPTS = {"environment": 4, "generator": 8, "backend": 10, "reward": 5, "agent": 5, "loss": 5, "logger": 3, "hook": 5}
"""Most names of whet that the source of a package may import: what its author has to learn."""


@pytest.mark.parametrize("word", CONCEPTS)
def test_a_package_needs_few_names_of_whet(packages: Packages, word: str) -> None:
    own, found = packages.folders[word].name.replace("-", "_"), set[str]()
    for file in (packages.folders[word] / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(module.startswith("whet") for module in modules), f"{file} hides names behind {modules}"
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0].startswith("whet"):
                found |= {alias.name for alias in node.names} if node.module.split(".")[0] != own else set()
    assert "*" not in found
    assert len(found) <= CONCEPTS[word], f"whet new {word} needs {len(found)} names: {', '.join(sorted(found))}"


def test_whet_knows_which_file_a_logger_writes(packages: Packages, tmp_path: Path) -> None:
    program = "import attrs, whet_my_logger.config as c; print(attrs.fields(c.MyLoggerConfig).file.metadata['writes'])"
    done = packages.run("-c", program, folder=tmp_path)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.slow
def test_their_own_tests_pass(packages: Packages) -> None:
    command = ["-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-W", "error::UserWarning"]
    tests = [str(folder) for folder in packages.folders.values()]
    done = packages.run(*command, *tests, folder=packages.folders["loss"])
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_they_make_a_run_together(packages: Packages, tiny_model_folder: Path, tmp_path: Path) -> None:
    document = {
        "run": {"folder": "run", "steps": 2, "export": False},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "my-algorithm", "prompts_per_step": 2, "group_size": 2, "loss": "my-loss"},
        "backend": {"use": "my-backend", "lr": 0.001},
        "generator": "my-generator",
        "rollout": {"max_tokens": 4},
        "environments": [{"use": "rewarded", "environment": "my-environment", "rewards": ["my-reward"]}, "my-agent"],
        "loggers": ["my-logger"],
        "hooks": [{"use": "my-hook", "metric": "ratio/mean", "at_least": 0.5}],
        "cluster": {"threads": {"backend": 1, "generator": 1}},
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
    done = packages.run("-m", "whet", "run", "it.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    for name in ("ratio/mean", "responses/different"):
        assert {row.split(",")[0] for row in rows if f",{name}," in row} == {"1", "2"}
    assert (tmp_path / "run" / "my-hook.txt").read_text().endswith(" at step 1\n")
    assert any(",reward/my-reward," in row for row in rows)


def test_their_keys_are_explained(packages: Packages, tmp_path: Path) -> None:
    done = packages.run("-m", "whet", "schema", "advantages/my-advantages", folder=tmp_path)
    assert done.stdout.startswith("advantages/my-advantages: Rewards minus a baseline between the mean of the group")
    assert "group_share  a number  = 0.8\n" in done.stdout


@pytest.mark.parametrize("word", STARTS)
def test_linters_have_nothing_to_say(packages: Packages, word: str) -> None:
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.exists():
        pytest.skip("ruff is not installed beside this Python")
    settings = ["--isolated", "--no-cache", "--config", "line-length=120"]
    declares = 'lint.flake8-bugbear.extend-immutable-calls=["whet.config.sections.selection"]'
    rules = ["check", "--select=E,F,W,I,B,UP,N,SIM,RUF", "--config", declares]
    for arguments in (rules, ["format", "--check", "--diff"]):
        command = [ruff, *arguments, *settings, "."]
        done = subprocess.run(command, capture_output=True, text=True, cwd=packages.folders[word], check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def command(packages: Packages, tmp_path: Path) -> Any:
    """Run `whet` with arguments in a temporary folder, in a process that sees the packages as installed."""
    return lambda *arguments: packages.run("-m", "whet", *arguments, folder=tmp_path)


@pytest.mark.parametrize("name", ["Word", "a b", "../x", "1st", "a_b", "-x", "a-", ""])
def test_other_names_are_refused(command: Any, name: str, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    done = command("new", "environment", "--", name)
    assert done.returncode == 2
    assert set(tmp_path.iterdir()) == before


def test_a_folder_that_exists_is_left_alone(command: Any, tmp_path: Path) -> None:
    (tmp_path / "whet-mine").mkdir()
    done = command("new", "loss", "mine")
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert not list((tmp_path / "whet-mine").iterdir())


def test_a_package_that_cannot_be_written_whole_is_not_there(tmp_path: Path) -> None:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, most[1]))
    try:
        done = CliRunner().invoke(new, ["filter", "mine", "--into", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"Error: cannot write {tmp_path / 'whet-mine'}: File too large\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("word", "warned"), [("loss", True), ("filter", False)])
def test_a_name_that_is_taken_is_a_warning(command: Any, word: str, warned: bool) -> None:
    done = command("new", word, "cispo")
    assert done.returncode == 0, done.stderr
    assert ("warning: the loss 'cispo' is offered by whet-grpo already" in done.stderr) is warned


@pytest.mark.parametrize(
    ("word", "name", "message"),
    [
        ("filter", "data", "whet-data is a distribution of whet; choose another name"),
        ("environment", "nemo-gym", "whet-env-nemo-gym is a distribution of whet; choose another name"),
        ("filter", "installed", "whet-installed is installed already; remove it or choose another name"),
        ("filter", "there", "whet_there is imported from {site}/whet_there/__init__.py already; choose another name"),
    ],
)
def test_a_package_that_would_hide_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, name: str, message: str
) -> None:
    site, into = tmp_path / "site", tmp_path / "new"
    for path, text in (
        ("whet_installed-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: whet.Installed\nVersion: 1\n"),
        ("whet_there/__init__.py", ""),
    ):
        (site / path).parent.mkdir(parents=True)
        (site / path).write_text(text)
    monkeypatch.syspath_prepend(str(site))
    done = CliRunner().invoke(new, [word, name, "--into", str(into)])
    assert (done.exit_code, done.stderr) == (1, f"Error: {message.format(site=site)}\n")
    assert not into.exists()
