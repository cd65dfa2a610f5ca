"""What decides a run's numbers is part of its identity, and nothing else is."""

from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from whet.component import Component, Selection
from whet.config.sections import Config, DataFile, DataSection, ModelSection, RunSection
from whet.data.chat import ChatTokenizer
from whet.data.offline import OfflineData
from whet.identity import identity_of
from whet.model import read_model


@frozen
class Plain:
    """A component without settings."""


def chosen(kind: Any) -> Selection:
    return Selection(kind, Component("x", Plain, "x:Y"), Plain())


@pytest.fixture
def identity(tiny_model_folder: Path) -> Any:
    def identify(*files: Path, max_length: int = 0, folder: str = "runs/x") -> dict[str, Any]:
        section = DataSection([DataFile(str(file)) for file in files], max_length=max_length)
        config = Config(
            RunSection(folder, 10), ModelSection(str(tiny_model_folder)), algorithm=chosen("algorithms"),
            backend=chosen("backends"), data=section,
        )  # fmt: skip
        data = OfflineData(section, ChatTokenizer(tiny_model_folder), 0, 0)
        return identity_of(config, read_model(tiny_model_folder), data, [])

    return identify


def test_files_may_move_but_not_change(identity: Any, tmp_path: Path) -> None:
    here, there, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    here.write_text('{"text": "one"}\n')
    there.write_text('{"text": "one"}\n')
    other.write_text('{"text": "two"}\n')
    assert identity(here, folder="runs/y") == identity(there)
    assert identity(here) != identity(other)
    assert identity(here, there) != identity(here)
    assert identity(here, max_length=8) != identity(here)
