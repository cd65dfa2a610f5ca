"""A plugin with components of several kinds, and a config that names them."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from whet.cli.app import group
from whet.plugins.registry import Registry, load_plugins
from whet_testing.forking import Programs

OFFERS = '''
from attrs import field, frozen, validators
from whet import hookimpl
from whet.component import Component
from whet.config.sections import selection
from whet.component import Selection

@frozen
class Clip:
    """A clipped loss."""
    low: float = field(default=0.2, validator=validators.ge(0))
    """How far down."""
    high: float = field(default=0.2, validator=validators.ge(0))
    """How far up."""

@frozen
class Loop:
    """A loop."""
    size: int = 8
    """How many."""
    loss: Selection = selection("losses", default="clip")
    """What is minimised."""
    filters: list[Selection] = field(factory=list, metadata={"kind": "filters", "default": None})
    """What is dropped."""

@frozen
class Optimizer:
    """An optimizer."""
    lr: float = field(default=1e-6, validator=validators.gt(0))
    """Learning rate."""

@frozen
class Trainer:
    """A trainer."""
    optimizer: Optimizer = field(factory=Optimizer)
    """Takes the steps."""

@frozen
class Nothing:
    """No keys."""

@frozen
class Sums:
    """Sums."""
    terms: int = 2
    """Numbers in a sum."""

@hookimpl
def whet_losses():
    return [Component("clip", Clip, __name__ + ":made")]

@hookimpl
def whet_algorithms():
    return [Component("loop", Loop, __name__ + ":made")]

@hookimpl
def whet_backends():
    return [Component("trainer", Trainer, __name__ + ":made")]

@hookimpl
def whet_loggers():
    return [Component("screen", Nothing, __name__ + ":made"), Component("paper", Nothing, __name__ + ":made")]

@hookimpl
def whet_environments():
    return [Component("sums", Sums, __name__ + ":made")]

def made(config, *args):
    return (config, *args)
'''


@pytest.fixture
def offers(install: Callable[..., Path]) -> Registry:
    """A registry of one plugin."""
    install("whet-offers", {"offers_hooks": OFFERS})
    return load_plugins()


@pytest.fixture
def config(offers: Registry, tmp_path: Path) -> Path:
    """A config that can be planned, with a model folder without weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    document = {
        "run": {"folder": "runs/it", "steps": 1}, "model": {"path": str(tmp_path / "model")}, "algorithm": "loop",
        "backend": "trainer", "loggers": ["screen"], "data": {"train": [{"path": "data.jsonl"}]},
    }  # fmt: skip
    path = tmp_path / "it.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `whet` with arguments in the folder of the config."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(group, arguments)


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Start what forks the processes of `alone`."""
    with Programs(["whet.cli.app", "whet.plan.load", "whet_start.plugins"]) as started:
        yield started


@pytest.fixture
def alone(site: Path, tmp_path: Path, programs: Programs) -> "Callable[..., subprocess.CompletedProcess[str]]":
    """Run `whet plugins` with arguments in a process of its own, which sees the distributions of `site` alone."""
    code = (
        "import importlib.metadata, whet.cli.app, whet.cli.commands, whet.plugins.registry, whet_start.plugins;"
        f"found = lambda: importlib.metadata.distributions(path=[{str(site)!r}]);"
        "whet.cli.commands.distributions = whet.plugins.registry.distributions = found;"
        "whet.cli.app.group.add_command(whet_start.plugins.plugins); whet.cli.main()"
    )
    variables = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1"}
    return lambda *arguments: programs.run(
        code, ("plugins", *arguments), folder=tmp_path, variables=variables, seconds=60
    )
