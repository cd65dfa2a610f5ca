"""The command line as people run it: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def command(site: Path, tmp_path: Path) -> Any:
    """Run `whet` with arguments in a temporary folder, seeing the plugins of `site` and no others."""
    environment = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1"}
    alone = (
        "import importlib.metadata, whet.plugins.registry; from whet.cli import main;"
        f"whet.plugins.registry.distributions = lambda: importlib.metadata.distributions(path=[{str(site)!r}]); main()"
    )

    def run(*arguments: str, code: str = alone) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def config(offers: Any, tmp_path: Path) -> Path:
    """A config that can be planned: components of `offers`, and a model folder without weights."""
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
