"""Installed plugins: a good one needs only its name in YAML, and a broken one harms nobody who does without it."""

import json
import shutil
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

OFFERS = """
from attrs import frozen
from whet import hookimpl
from whet.component import Component

@frozen
class Config:
    '''Nothing to set.'''

@hookimpl
def whet_{kind}():
    return [Component("{name}", Config, "{target}")]
"""
WRONG_SIGNATURE = """
from whet import hookimpl

@hookimpl
def whet_step_finished(step, numbers):
    pass
"""
LISTENS = """
from whet import hookimpl

@hookimpl
def whet_step_finished(step, metrics):
    with open("heard.txt", "a") as file:
        file.write(f"{step} {metrics['reward/mean']}\\n")

@hookimpl(wrapper=True)
def whet_run(algorithm, parts):
    with open("heard.txt", "a") as file:
        file.write(f"begins with {type(algorithm).__name__}\\n")
    result = yield
    with open("heard.txt", "a") as file:
        file.write("ended\\n")
    return result
"""
BROKEN = {
    "whet-fails": ("raise RuntimeError('no licence found')", ""),
    "whet-lacks": ("import a_module_that_nobody_has", ""),
    "whet-old": ("raise SystemExit('never imported')", "whet>=0.0.1,<0.0.2"),
    "whet-argues": (WRONG_SIGNATURE, ""),
    "whet-one": (OFFERS.format(kind="loggers", name="twice", target="one:Logger"), ""),
    "whet-two": (OFFERS.format(kind="loggers", name="twice", target="two:Logger"), ""),
    "whet-missing": (OFFERS.format(kind="environments", name="missing", target="not_there:Environment"), ""),
}
REASONS = {
    "whet-fails": "RuntimeError: no licence found (site-packages/whet_fails_hooks.py, line 1)",
    "whet-lacks": "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    "whet-old": "it is made for whet<0.0.2,>=0.0.1, and this is whet",
    "whet-argues": "whet_step_finished",
}


@pytest.fixture(scope="module")
def layered_python(new_layer: Callable[[], Path]) -> Path:
    """An environment of this module's own: what is broken in it troubles no other test."""
    return new_layer()


@pytest.fixture(scope="module")
def site(layered_python: Path) -> Path:
    """The folder into which packages of the layered environment are installed."""
    (folder,) = layered_python.parent.glob("lib/python*/site-packages")
    return folder


def install(site: Path, name: str, source: str, requires: str = "") -> None:
    """Put there what pip would have: a module of hooks, and the distribution that tells of it."""
    module = f"{name.replace('-', '_')}_hooks"
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    wanted = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{wanted}")
    (info / "entry_points.txt").write_text(f"[whet]\n{name} = {module}\n")
    (site / f"{module}.py").write_text(textwrap.dedent(source))


@pytest.fixture(scope="module")
def crowded(site: Path) -> Path:
    """The environment with the example package, a plugin that listens, and everything that is broken."""
    example = ROOT / "examples" / "whet-env-reverse"
    project = tomllib.loads((example / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(example / "src" / "whet_env_reverse", site / "whet_env_reverse")
    info = site / f"whet_env_reverse-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("[whet]\nreverse = whet_env_reverse.hooks\n")
    install(site, "whet-listens", LISTENS)
    for name, (source, requires) in BROKEN.items():
        install(site, name, source, requires)
    return site


@pytest.fixture
def command(crowded: Path, layered_python: Path, whet: Callable) -> Callable:
    """Run `whet` in that environment."""
    return lambda *arguments, folder=None: whet(*arguments, folder=folder, python=layered_python / "python")


def test_every_broken_plugin_is_listed_with_its_reason(command):
    found = json.loads(command("plugins", "--json").output)
    reasons = {broken["distribution"]: broken["reason"] for broken in found["broken"]}
    assert set(reasons) == set(REASONS)
    for name, reason in REASONS.items():
        assert reason in reasons[name]
    assert found["contested"]["loggers"] == {"twice": ["whet-one", "whet-two"]}
    assert found["components"]["environments"]["reverse"] == "whet-env-reverse"
    assert found["components"]["algorithms"]["grpo"] == "whet-grpo"


def small(folder: Path, model: Path) -> list[str]:
    return [
        f"model.path={model}", f"run.folder={folder / 'run'}", "run.steps=2", "run.export=false", "loggers=[]",
        "algorithm.prompts_per_step=2", "algorithm.group_size=2", "evaluation.environments=[]", "rollout.max_tokens=6",
    ]  # fmt: skip


def test_an_installed_package_works_from_yaml_in_spite_of_them(command, tiny_model_folder, tmp_path):
    recipe = ROOT / "examples" / "whet-env-reverse" / "reverse.yaml"
    done = command("run", recipe, *small(tmp_path, tiny_model_folder), folder=tmp_path)
    assert done.code == 0, done.errors
    assert "Traceback" not in done.errors
    warned = [line for line in done.errors.splitlines() if line.startswith("warning: not usable: ")]
    assert sorted(line.split()[3] for line in warned) == sorted(REASONS)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    heard = [f"{row['step']} {row['reward/mean']}" for row in rows]
    assert (tmp_path / "heard.txt").read_text().splitlines() == ["begins with Grpo", *heard, "ended"]
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["whet-env-reverse"] == "0.1.0"


def test_a_single_file_works_from_yaml_in_spite_of_them(command, tiny_model_folder, tmp_path):
    recipe = ROOT / "examples" / "single_file_environment.yaml"
    done = command("run", recipe, *small(tmp_path, tiny_model_folder), folder=tmp_path)
    assert done.code == 0, done.errors
    played = (tmp_path / "run" / "rollouts" / "step-000002.jsonl").read_text().splitlines()
    assert [json.loads(line)["environment"] for line in played] == ["letters"] * 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "loggers=[twice]",
            "loggers.0.use: the logger 'twice' is offered by whet-one and whet-two; choose one by `use: whet-o",
        ),
        ("loggers=[consle]", "there is no logger 'consle' (did you mean 'console'?)"),
        ("loggers=[licensed]", "; not usable, and might offer it: "),
        ("loggers=[licensed]", "whet-argues (plugin 'whet-argues'): "),
        ("loggers=[licensed]", "whet-fails (plugin 'whet-fails'): RuntimeError: no licence found"),
        ("loggers=[licensed]", "whet-old (plugin 'whet-old'): it is made for whet<0.0.2,>=0.0.1, and this is whet"),
    ],
)
def test_a_name_that_a_broken_plugin_may_have_offered_quotes_it(
    command, tiny_model_folder, tmp_path, override, message
):
    recipe = ROOT / "examples" / "whet-env-reverse" / "reverse.yaml"
    assert message in command("check", recipe, *small(tmp_path, tiny_model_folder), override).error


def test_a_component_whose_target_is_not_there_is_named_when_it_is_used(command, tiny_model_folder, tmp_path):
    recipe = ROOT / "examples" / "whet-env-reverse" / "reverse.yaml"
    given = [*small(tmp_path, tiny_model_folder), "environments=[missing]"]
    error = command("run", recipe, *given).error
    assert "'not_there:Environment' cannot be imported: ModuleNotFoundError: No module named 'not_there'" in error


@pytest.mark.parametrize("arguments", [["schema", "rollout"], ["--help"], ["plugins"]], ids=" ".join)
def test_commands_that_need_none_of_them_work(command, arguments):
    done = command(*arguments)
    assert done.code == 0, done.errors
    assert "Traceback" not in done.errors
