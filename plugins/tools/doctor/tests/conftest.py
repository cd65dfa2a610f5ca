"""A config that could be run."""

from pathlib import Path

import pytest
import yaml

from whet.plugins.registry import Registry


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
