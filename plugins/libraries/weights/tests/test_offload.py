"""Memory that is given back for a while comes back as it was, to whoever refers to it."""

import os
from pathlib import Path

import pytest
import torch

from whet.errors import WhetError
from whet_weights.offload import Offload, Slabs

MIB = 1 << 20


def resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def some(mib: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(mib * MIB // 4, generator=torch.Generator().manual_seed(seed))


def test_the_process_has_less_memory_meanwhile_and_the_tensors_are_the_same_afterwards(tmp_path: Path) -> None:
    tensors, offload = [some(16, seed) for seed in range(8)], Offload(tmp_path / "deep" / "file")
    before, expected = resident(), [float(tensor.double().sum()) for tensor in tensors]
    given = offload.sleep(tensors)
    asleep = resident()
    assert given > 127 * MIB
    assert before - asleep > 120 * MIB
    assert (tmp_path / "deep/file").stat().st_size == given
    assert offload.asleep
    offload.wake()
    assert [float(tensor.double().sum()) for tensor in tensors] == expected
    assert not offload.asleep
    assert not (tmp_path / "deep/file").exists()


def test_what_shares_memory_is_given_back_once_and_comes_back_to_all(tmp_path: Path) -> None:
    whole, offload = some(4), Offload(tmp_path / "file")
    upper, row = whole[:MIB], whole.view(-1, 1024)[7]
    expected = row.clone()
    assert offload.sleep([whole, upper, row]) <= 4 * MIB
    assert (tmp_path / "file").stat().st_size <= 4 * MIB
    offload.wake()
    assert torch.equal(row, expected)
    assert torch.equal(upper, whole[:MIB])


def test_a_buffer_that_numpy_has_seen_is_given_back_like_any_other(tmp_path: Path) -> None:
    tensor, offload = some(4), Offload(tmp_path / "file")
    array = tensor.numpy()
    expected = array.copy()
    assert offload.sleep([tensor]) > 3 * MIB
    offload.wake()
    assert (array == expected).all()


def test_to_sleep_or_wake_twice_is_once(tmp_path: Path) -> None:
    tensor, offload = some(2), Offload(tmp_path / "file")
    expected = tensor.clone()
    assert [bool(offload.sleep([tensor])) for _ in range(2)] == [True, False]
    for _ in range(2):
        offload.wake()
    assert torch.equal(tensor, expected)


def test_what_is_to_be_written_anew_is_not_read(tmp_path: Path) -> None:
    tensor, offload = some(2), Offload(tmp_path / "file")
    offload.sleep([tensor])
    (tmp_path / "file").write_bytes(b"")
    offload.wake(contents=False)
    tensor.fill_(3.0)
    assert float(tensor.sum()) == 3.0 * tensor.numel()


def test_where_there_is_no_room_nothing_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("no folder")
    tensor, offload = some(2), Offload(tmp_path / "full" / "file")
    expected = tensor.clone()
    with pytest.raises(WhetError, match="full"):
        offload.sleep([tensor])
    assert not offload.asleep
    assert torch.equal(tensor, expected)


def test_a_file_that_lacks_something_is_told(tmp_path: Path) -> None:
    tensor, offload = some(2), Offload(tmp_path / "file")
    given = offload.sleep([tensor])
    with (tmp_path / "file").open("r+b") as stream:
        stream.truncate(given - 5)
    with pytest.raises(WhetError, match=f"ends after {given - 5} of the {given} bytes"):
        offload.wake()


@pytest.mark.gpu
def test_memory_of_a_gpu_is_free_for_others_meanwhile(tmp_path: Path) -> None:
    tensors, offload = [some(64, seed).cuda() for seed in range(4)], Offload(tmp_path / "file")
    expected = [tensor.cpu() for tensor in tensors]
    before, _ = torch.cuda.mem_get_info()
    for _ in range(2):
        assert offload.sleep(tensors) == 256 * MIB
        assert torch.cuda.mem_get_info()[0] - before >= 250 * MIB
        offload.wake()
        assert all(torch.equal(tensor.cpu(), there) for tensor, there in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("slab_bytes", [16, 64, 1 << 20])
def test_slabs_hold_what_was_taken_wherever_their_borders_fall(slab_bytes: int) -> None:
    slabs = Slabs(slab_bytes)
    for sizes in ((5, 64), (1, 63, 64, 200, 15), (7,)):
        tensors = [torch.arange(n, dtype=torch.uint8) + len(sizes) for n in sizes]
        storages = [tensor.untyped_storage() for tensor in tensors]
        expected = [tensor.clone() for tensor in tensors]
        slabs.take(storages)
        for tensor in tensors:
            tensor.zero_()
        slabs.give(storages)
        assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, expected, strict=True))
