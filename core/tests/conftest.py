"""A folder of installed plugins: real modules with real metadata, seen by this process and by child processes."""

import importlib.metadata
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import whet.plugins.registry

Install = Callable[..., Path]

OFFERS = '''
from attrs import field, frozen, validators
from whet import hookimpl
from whet.component import Component
from whet.config.sections import selection, optional_selection
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
def whet_filters():
    return [Component("not-flat", Nothing, __name__ + ":made")]

@hookimpl
def whet_loggers():
    return [Component("screen", Nothing, __name__ + ":made"), Component("paper", Nothing, __name__ + ":made")]

@hookimpl
def whet_environments():
    return [Component("sums", Sums, __name__ + ":made")]

def made(config, *args):
    return (config, *args)
'''
"""The hooks of a plugin that offers one of almost everything."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder in which plugins are looked for."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(
        whet.plugins.registry, "distributions", lambda: importlib.metadata.distributions(path=[str(folder)])
    )
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    """Install a distribution whose entry points are modules of the same names with the given sources."""

    def install_distribution(
        distribution: str, modules: Mapping[str, str], *, version: str = "1.0", requires: str = ""
    ) -> Path:
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        wanted = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{wanted}")
        entries = "".join(f"{module} = {module}\n" for module in modules)
        (info / "entry_points.txt").write_text(f"[whet]\n{entries}")
        for module, source in modules.items():
            (site / f"{module}.py").write_text(textwrap.dedent(source))
        return info

    return install_distribution


@pytest.fixture
def offers(install: Install) -> whet.plugins.registry.Registry:
    """A registry of one plugin that offers almost everything."""
    install("whet-offers", {"offers_hooks": OFFERS})
    return whet.plugins.registry.load_plugins()
