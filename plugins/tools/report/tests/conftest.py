"""What the tests of the report share."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def beside(name: str) -> ModuleType:
    """Import a module of this folder: tests are imported without a package."""
    spec = importlib.util.spec_from_file_location(f"report_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_folders() -> ModuleType:
    """Writes run folders; see `run_folders.py`."""
    return beside("run_folders")


@pytest.fixture(scope="session")
def browsers() -> ModuleType:
    """Drives a browser; see `browser.py`."""
    return beside("browser")
