"""The mapped file is kept: rewritten in place, and grown where the weights grow."""

import errno
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from whet.errors import RefitError
from whet.refit import shared_memory
from whet.refit.handover import receive, send
from whet.refit.link import Link


def make_link(folder: Path, version: int = 1) -> Link:
    return Link("shared-memory", str(folder), uuid.uuid4().hex, version, timeout_seconds=5.0)


def test_the_file_is_rewritten_in_place(tmp_path: Path) -> None:
    inodes = set()
    for version in range(3):
        link = make_link(tmp_path, version)
        send(link, [("a", torch.full((100, 100), float(version)))])
        inodes.add((tmp_path / "weights-0.bin").stat().st_ino)
        assert {name: float(t.mean()) for name, t in receive(link)} == {"a": float(version)}
    assert len(inodes) == 1


def test_larger_weights_grow_the_file(tmp_path: Path) -> None:
    for size in (10, 100_000, 3_000_000):
        link, tensor = make_link(tmp_path), torch.randn(size)
        send(link, [("a", tensor), ("b", tensor[:7])])
        found = {name: t.clone() for name, t in receive(link)}
        assert torch.equal(found["a"], tensor)
        assert torch.equal(found["b"], tensor[:7])


def test_a_folder_made_anew_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for version in range(2):
        link = make_link(folder, version)
        send(link, [("a", torch.full((4,), float(version)))])
        assert [t.tolist() for _, t in receive(link)] == [[float(version)] * 4]
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_a_full_file_system_is_an_error_and_not_a_dead_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(RefitError, match=r"No space left on device.*use the transport `disk`"):
        send(make_link(tmp_path), [("a", torch.zeros(10))])


RECEIVER = """
import sys
from whet.refit.handover import receive
from whet.refit.link import Link
link = Link("shared-memory", sys.argv[1], sys.argv[2], 1, timeout_seconds=60.0)
print(sum(float(t.double().sum()) for _, t in receive(link)))
"""


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    link, tensor = make_link(tmp_path), torch.randn(1000, 10)
    command = [sys.executable, "-c", RECEIVER, link.address, link.session]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        send(link, [("a", tensor), ("b", tensor * 2)])
        output, _ = process.communicate(timeout=60)
    assert float(output) == pytest.approx(3 * float(tensor.double().sum()))
