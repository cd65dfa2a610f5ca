"""The mapped file is kept: rewritten in place, and grown where the weights grow."""

import errno
import json
import os
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet_weights import shared_memory
from whet_weights.driver import Files
from whet_weights.transfer import receive, send


def make_spec(folder: Path, version: int = 1) -> TransferSpec:
    return TransferSpec("shared-memory", str(folder), uuid.uuid4().hex, version, timeout_seconds=5.0)


def written(folder: Path) -> str:
    """Return where the tensors of the folder's last session are, as its manifest says."""
    return json.loads((folder / "manifest-0.json").read_text())["entries"][0]["file"]


def test_the_memory_is_rewritten_in_place(tmp_path: Path) -> None:
    places = set()
    for version in range(3):
        spec = make_spec(tmp_path, version)
        send(spec, [("a", torch.full((100, 100), float(version)))])
        places.add(written(tmp_path))
        assert {name: float(t.mean()) for name, t in receive(spec)} == {"a": float(version)}
    assert len(places) == 1


def test_no_weight_is_written_to_the_folder(tmp_path: Path) -> None:
    send(make_spec(tmp_path), [("a", torch.randn(1 << 20))])
    assert [file.name for file in tmp_path.iterdir()] == ["manifest-0.json"]
    assert (tmp_path / "manifest-0.json").stat().st_size < 1000


@pytest.mark.parametrize("size", [10, 100_000, 3_000_000])
def test_where_the_system_has_no_such_files_one_in_the_folder_takes_their_place(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    for version in range(2):
        spec = make_spec(tmp_path, version)
        send(spec, [("a", torch.full((size,), float(version)))])
        assert {name: float(t.mean()) for name, t in receive(spec)} == {"a": float(version)}
    assert written(tmp_path) == "weights-0.bin"


def test_larger_weights_grow_the_file(tmp_path: Path) -> None:
    for size in (10, 100_000, 3_000_000):
        spec, tensor = make_spec(tmp_path), torch.randn(size)
        send(spec, [("a", tensor), ("b", tensor[:7])])
        found = {name: t.clone() for name, t in receive(spec)}
        assert torch.equal(found["a"], tensor)
        assert torch.equal(found["b"], tensor[:7])


def test_a_folder_made_anew_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for version in range(2):
        spec = make_spec(folder, version)
        send(spec, [("a", torch.full((4,), float(version)))])
        assert [t.tolist() for _, t in receive(spec)] == [[float(version)] * 4]
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_a_full_file_system_is_an_error_and_not_a_dead_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"No space left on device.*use the transport `disk`"):
        send(make_spec(tmp_path), [("a", torch.zeros(10))])


def test_weights_larger_than_free_memory_are_an_error_and_not_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet_weights.shared_pages.available_memory", lambda: 1 << 20)
    with pytest.raises(WeightSyncError, match=r"weights of 4 MB do not fit into memory: 1 MB are available.*`disk`"):
        send(make_spec(tmp_path), [("a", torch.zeros(1 << 20))])


SENDER = """
import sys
import torch
from whet_weights.transfer import send
from whet.interfaces.weights import TransferSpec
spec = TransferSpec("shared-memory", sys.argv[1], sys.argv[2], 1, timeout_seconds=60.0)
send(spec, [("a", torch.full((1 << 20,), 3.0))])
print("sent", flush=True)
sys.stdin.read()
"""


def test_memory_lives_as_long_as_its_sender_and_a_successor_takes_its_place(tmp_path: Path) -> None:
    before = mapped()
    for _ in range(3):
        spec = make_spec(tmp_path)
        command = [sys.executable, "-c", SENDER, spec.address, spec.session]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "sent\n"
            assert {name: float(t.mean()) for name, t in receive(spec)} == {"a": 3.0}
        with pytest.raises(WeightSyncError, match=r"a in .*memory-.* is damaged: its sender is gone"):
            list(receive(spec))
    assert mapped() - before <= 1, "mappings of senders that are gone are kept"


def mapped() -> int:
    """Count the memory of senders that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:whet-tensors-")


def test_a_number_that_another_file_has_by_now_is_not_read(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    send(spec, [("a", torch.zeros(4))])
    manifest = tmp_path / "manifest-0.json"
    with (tmp_path / "other").open("wb") as other:
        other.write(bytes(64))
        other.flush()
        name = f"memory-{os.getpid()}-{other.fileno()}"
        manifest.write_text(manifest.read_text().replace(written(tmp_path), name))
        with pytest.raises(WeightSyncError, match="its sender is gone"):
            list(receive(spec))


RECEIVER = """
import sys
from whet_weights.transfer import receive
from whet.interfaces.weights import TransferSpec
spec = TransferSpec("shared-memory", sys.argv[1], sys.argv[2], 1, timeout_seconds=60.0)
print(sum(float(t.double().sum()) for _, t in receive(spec)))
"""


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    spec, tensor = make_spec(tmp_path), torch.randn(1000, 10)
    command = [sys.executable, "-c", RECEIVER, spec.address, spec.session]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        send(spec, [("a", tensor), ("b", tensor * 2)])
        output, _ = process.communicate(timeout=60)
    assert float(output) == pytest.approx(3 * float(tensor.double().sum()))


def held() -> int:
    """Return the bytes of weights that this process keeps open."""
    sizes = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            sizes += link.stat().st_size if "whet-tensors" in os.readlink(link) else 0
    return sizes


def test_a_run_whose_workers_are_in_its_process_leaves_no_memory(tmp_path: Path) -> None:
    before = held()
    spec = make_spec(tmp_path)
    driver = Files(spec, lambda: "127.0.0.1", lambda *_: {})
    send(spec, [("a", torch.zeros(1 << 20))])
    ((_, tensor),) = receive(spec)
    assert held() > before
    driver.close()
    assert held() == before
    assert not tensor.any(), "a tensor that is in use stays"
