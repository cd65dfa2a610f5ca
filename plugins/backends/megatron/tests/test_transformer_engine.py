"""Transformer Engine: nothing installs it unasked, and one that cannot load is named with what to do."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def wanted(name, extra=""):
    """Return the names of the distributions that one asks for, alone or with an extra, on this machine."""
    lines = importlib.metadata.requires(name) or []
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(one.name) for one in parsed if not one.marker or one.marker.evaluate({"extra": extra})}


def closure(name):
    """Return everything that comes with a distribution, as far as it is installed here."""
    found, rest = set(), {canonicalize_name(name)}
    while rest:
        one = rest.pop()
        found.add(one)
        try:
            rest |= wanted(one) - found
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def test_nothing_but_its_extra_installs_transformer_engine():
    assert "transformer-engine" in wanted("whet-megatron", "te")
    assert not [name for name in closure("whet-megatron") if name.startswith("transformer-engine")]


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError('Found empty transformer-engine meta package installed')",
        "OSError('libcudnn.so.9: cannot open shared object file')",
    ],
)
def test_an_engine_that_cannot_load_ends_the_start_of_a_worker_with_what_to_do(tmp_path, error):
    """Megatron itself would raise the engine's own error from some import, which says nothing of what to do."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(f"raise {error}")
    code = (
        "from whet.data.model_info import ModelInfo\n"
        "from whet.interfaces.workers import WorkerRank\n"
        "from whet_megatron.worker import Worker\n"
        f"Worker(WorkerRank('backend', 0, 1), {{}}, ModelInfo('model', {{}}), scratch={str(tmp_path)!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    last = found.stderr.strip().splitlines()[-1]
    assert "ConfigError: backend: Transformer Engine is installed and cannot load" in last, found.stderr
    assert error.partition("'")[2].rstrip("')") in last
    assert "pip uninstall transformer-engine" in last
    assert "pip install 'whet-megatron[te]'" in last
