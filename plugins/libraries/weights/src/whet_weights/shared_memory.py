"""Weight sync through shared memory. Each sender keeps one block and rewrites it in place for every session.

    sender      an anonymous file in memory (memfd), open as long as its process lives
    receiver    opens /proc/PROCESS/fd/NUMBER, as the manifest states, and maps the same pages
    other nodes the driver has the block carried to each node of receivers, once, see `carry`

No weight is written to a disk: the run folder, which may be on a network file system, holds only the manifest. The size
of /dev/shm is no limit. The kernel frees the memory when the last process that has it open or mapped is gone, however
that process ended. Such files exist on Linux; elsewhere a file in the folder of the transfer takes their place.

New pages cost most: writing a gigabyte to them takes ten times as long as writing to pages that are mapped already.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define

from whet.errors import WeightSyncError, WhetError, in_words
from whet.interfaces.weights import TransferSpec
from whet_weights import shared_pages
from whet_weights.manifest import (
    Entry,
    await_manifests,
    checksum,
    damaged,
    dtype_name,
    publish,
    still_current,
    withdraw,
)

if TYPE_CHECKING:
    import torch

ALIGN: Final = 64
GROW: Final = 16 << 20


@define
class _Mapping:
    inode: int
    data: Any
    """The whole file as a uint8 tensor."""


@define
class _Room:
    """The memory of one sender of this process."""

    name: str
    """Its name in manifests: `memory-PROCESS-DESCRIPTOR`, or a file in the folder of the transfer."""
    path: Path
    descriptor: int = -1
    """Keeps an anonymous file open; -1: the file has a name."""


_rooms: dict[tuple[str, int], _Room] = {}
"""Memory of senders, by address of the transfer and sender."""
_mappings: dict[tuple[str, int, str], _Mapping] = {}
"""Mappings of this process, by address, sender and end (`send` or `receive`). There is one mapping for each, so the
memory of a sender that is gone is freed when its successor's is mapped."""


def send(spec: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int = 0) -> None:
    """Write the tensors to the sender's memory, cast to `spec.dtype`, and publish the manifest."""
    withdraw(spec, sender)
    entries: list[Entry] = []
    offset = size = 0
    try:
        room = _room(spec, sender)
        for name, tensor in weights:
            stored, end = _write(spec, sender, room, offset, tensor)
            entries.append(
                Entry(name, tuple(tensor.shape), dtype_name(stored.dtype), checksum(stored), room.name, offset)
            )
            offset, size = -(-end // ALIGN) * ALIGN, end
        node = shared_pages.this_node() if room.descriptor >= 0 else ""
    except BaseException as error:
        publish(spec, sender, (), in_words(error))
        raise
    publish(spec, sender, entries, node=node, size=size)


def receive(spec: TransferSpec, receiver: int = 0) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield every tensor as a view of the shared memory. Copy it before reading the next.

    Raises `WeightSyncError` for a missing, stale, inconsistent or damaged transfer.
    """
    manifests = await_manifests(spec)
    for manifest in manifests:
        for entry in manifest.entries:
            yield entry.name, _read(spec, manifest.sender, entry)
    still_current(spec, manifests)


def release(address: str) -> None:
    """Free what this process holds of the memory of a run's transfers. Tensors that are in use keep theirs."""
    for key in [key for key in _mappings if key[0] == address]:
        del _mappings[key]
    for own in [key for key in _rooms if key[0] == address]:
        if (room := _rooms.pop(own)).descriptor >= 0:
            os.close(room.descriptor)


def _room(spec: TransferSpec, sender: int) -> _Room:
    """Return the memory of a sender of this process, which is the same for all sessions of a run."""
    found = _rooms.get((spec.address, sender))
    if found is None:
        found = _rooms[spec.address, sender] = _new_room(Path(spec.address), sender)
    return found


def _new_room(folder: Path, sender: int) -> _Room:
    if not hasattr(os, "memfd_create"):
        return _Room(name := f"weights-{sender}.bin", folder / name)
    try:
        descriptor = shared_pages.create()
    except OSError as error:
        raise WeightSyncError(f"no shared memory for weights: {error.strerror}; use the transport `disk`") from error
    return _Room(shared_pages.name_of(descriptor), Path(f"/proc/{os.getpid()}/fd/{descriptor}"), descriptor)


def _write(
    spec: TransferSpec, sender: int, room: _Room, offset: int, tensor: "torch.Tensor"
) -> "tuple[torch.Tensor, int]":
    import torch

    kind = getattr(torch, spec.dtype) if spec.dtype else tensor.dtype
    end = offset + tensor.numel() * kind.itemsize
    key = (spec.address, sender, "send")
    mapping = _mappings.get(key)
    if mapping is None or mapping.data.numel() < end or not _is(mapping, room.path):
        _grow(room, end)
        mapping = _mappings[key] = _map(room.path)
    stored = mapping.data[offset:end].view(kind).view(tensor.shape)
    stored.copy_(tensor.detach())
    return stored, end


def _is(mapping: _Mapping, file: Path) -> bool:
    return file.exists() and mapping.inode == file.stat().st_ino


def _grow(room: _Room, size: int) -> None:
    size = -(-size // GROW) * GROW if size > GROW else max(size, ALIGN)
    descriptor = os.open(room.path, os.O_RDWR | os.O_CREAT, 0o600) if room.descriptor < 0 else room.descriptor
    try:
        if room.descriptor >= 0:
            shared_pages.reserve(descriptor, size)
        else:
            os.posix_fallocate(descriptor, 0, size)
    except WhetError as error:
        raise WeightSyncError(f"{error}; give the container more, or use the transport `disk`") from error
    except OSError as error:
        where = room.path if room.descriptor < 0 else "the shared memory of weights"
        raise WeightSyncError(
            f"{where} cannot grow to {size / 1e6:.0f} MB: {error.strerror}; make room, or use the transport `disk`"
        ) from error
    finally:
        if room.descriptor < 0:
            os.close(descriptor)


def _map(file: Path) -> _Mapping:
    import torch

    status = file.stat()
    data = torch.from_file(str(file), shared=True, size=status.st_size, dtype=torch.uint8)
    return _Mapping(status.st_ino, data)


def _read(spec: TransferSpec, sender: int, entry: Entry) -> "torch.Tensor":
    import torch

    dtype: torch.dtype = getattr(torch, entry.dtype)
    end = entry.offset + dtype.itemsize * torch.Size(entry.shape).numel()
    try:
        file = shared_pages.find(entry.file) or Path(spec.address) / entry.file
        status = file.stat()
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        raise damaged(spec, entry, "its sender is gone" if gone else f"it cannot be read: {error.strerror}") from None
    if status.st_size < end:
        raise damaged(spec, entry, f"the file has {status.st_size} bytes, wanted {end}")
    key = (spec.address, sender, "receive")
    mapping = _mappings.get(key)
    if mapping is None or mapping.inode != status.st_ino or mapping.data.numel() != status.st_size:
        mapping = _mappings[key] = _map(file)
    tensor: torch.Tensor = mapping.data[entry.offset : end].view(dtype).view(entry.shape)
    found = checksum(tensor)
    if found != entry.checksum:
        raise damaged(spec, entry, f"checksum {found:08x}, wanted {entry.checksum:08x}")
    return tensor
