"""What installed distributions declare is read once for each folder of the path, and again when a folder changes."""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import pytest

from whet import installed


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a distribution into a folder, and makes these folders the whole import path."""
    path: list[str] = []
    monkeypatch.setattr("sys.path", path)

    def in_folder(folder: str, name: str, entries: bytes = b"", version: str = "1.0") -> None:
        at = tmp_path / folder
        info = at / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: of a book\n")
        (info / "entry_points.txt").write_bytes(entries)
        if str(at) not in path:
            path.append(str(at))
        os.utime(at, ns=(0, len(list(at.iterdir()))))  # two changes within one tick of the clock differ

    return in_folder


def test_entry_points_of_a_group_are_found_and_of_two_alike_those_of_the_first_folder(put: Any) -> None:
    put("first", "whet-a", b"[whet.commands]\none = a:one\n[whet]\na = a.hooks\n")
    put("second", "Whet_A", b"[whet.commands]\ntwo = a:two\n")
    put("second", "whet-b", b"[whet.commands]\nthree = b:three\n[other]\nfour = b:four\n")
    assert [entry.name for entry in installed.entry_points("whet.commands")] == ["one", "three"]
    assert [entry.value for entry in installed.entry_points("whet")] == ["a.hooks"]
    assert installed.entry_points("whet.moved") == []


def test_what_is_installed_later_is_found(put: Any) -> None:
    put("first", "whet-a", b"[whet]\na = a.hooks\n")
    assert list(installed.versions()) == ["whet-a"]
    put("first", "whet-b", b"[whet]\nb = b.hooks\n", version="2.5")
    assert {entry.name for entry in installed.entry_points("whet")} == {"a", "b"}
    put("second", "whet-c", b"[whet]\nc = c.hooks\n")
    assert {entry.name for entry in installed.entry_points("whet")} == {"a", "b", "c"}
    assert installed.versions() == {"whet-a": "1.0", "whet-b": "2.5", "whet-c": "1.0"}


def test_a_folder_that_has_not_changed_is_read_once(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put("first", "whet-a", b"[whet]\na = a.hooks\n")
    put("second", "whet-b", b"[whet]\nb = b.hooks\n")
    read, distributions = list[str](), importlib.metadata.distributions

    def counted(path: list[str]) -> Any:
        read.append(Path(path[0]).name)
        return distributions(path=path)

    monkeypatch.setattr(importlib.metadata, "distributions", counted)
    for _ in range(3):
        assert len(installed.entry_points("whet")) == len(list(installed.distributions())) == 2
    put("second", "whet-c")
    assert len(installed.entry_points("whet")) == 2
    assert read == ["first", "second", "second"]


def test_unreadable_entry_points_harm_no_others_and_their_distribution_can_be_named(put: Any) -> None:
    put("first", "whet-bytes", b"[whet]\na = \xff\n")
    put("first", "whet-words", b"[whet]\nno sense\n")
    put("first", "whet-good", b"[whet]\ngood = good.hooks\n")
    put("first", "numpy", b"[console_scripts]\nf2py = numpy:main\n")
    assert [entry.name for entry in installed.entry_points("whet")] == ["good"]
    assert {found.name for found in installed.distributions()} == {"whet-bytes", "whet-words", "whet-good"}


def test_metadata_that_cannot_be_read_hides_no_other_version(put: Any, tmp_path: Path) -> None:
    put("first", "whet-bytes")
    put("first", "whet-good", version="2.0")
    (tmp_path / "first" / "whet_bytes-1.0.dist-info" / "METADATA").write_bytes(b"Name: \xff\n")
    assert installed.versions() == {"whet-good": "2.0"}


def test_names_are_compared_as_the_index_does() -> None:
    assert installed.normal("Whet__Env.Tools") == "whet-env-tools"
