"""A plugin with the least that a run needs, and a config of it that could be run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from whet.plugins.registry import Registry, load_plugins

OFFERS = '''
from attrs import frozen
from whet import Component, hookimpl

@frozen
class Nothing:
    """No keys."""

@hookimpl
def whet_algorithms():
    return [Component("loop", Nothing, __name__ + ":made")]

@hookimpl
def whet_backends():
    return [Component("trainer", Nothing, __name__ + ":made")]

def made(config, *args):
    return (config, *args)
'''


@pytest.fixture
def offers(install: Callable[..., Path]) -> Registry:
    """A registry of one plugin with an algorithm and a backend."""
    install("whet-offers", {"offers_hooks": OFFERS})
    return load_plugins()


@pytest.fixture
def good(offers: Registry, tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A config that could be run."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    document = {
        "run": {"folder": str(tmp_path / "runs" / "it"), "steps": 1}, "model": {"path": str(tiny_model_folder)},
        "algorithm": "loop", "backend": "trainer", "data": {"train": [{"path": str(tmp_path / "data.jsonl")}]},
    }  # fmt: skip
    path = tmp_path / "it.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
