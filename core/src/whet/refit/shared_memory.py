"""Hand-over through one mapped file per sender, kept and rewritten in place for every session.

Fresh pages are what costs: a gigabyte written to new pages takes ten times as long as to pages that are mapped
already. Put the folder on a memory file system such as /dev/shm; whoever made the folder removes it.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

from whet.errors import RefitError, in_words
from whet.refit.link import Link
from whet.refit.manifest import (
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

ALIGN = 64
GROW = 16 << 20


@define
class _Mapping:
    inode: int
    data: Any
    """The whole file as a uint8 tensor."""


_mappings: dict[tuple[Path, str], _Mapping] = {}
"""What this process has mapped, by file and end: (path, "send" | "receive")."""


def send(link: Link, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int = 0) -> None:
    """Write the tensors to the sender's file, cast to `link.dtype`, and publish the manifest."""
    file = Path(link.address) / f"weights-{sender}.bin"
    withdraw(link, sender)
    entries: list[Entry] = []
    offset = 0
    try:
        for name, tensor in weights:
            stored, end = _write(file, offset, tensor, link.dtype)
            entries.append(
                Entry(name, tuple(tensor.shape), dtype_name(stored.dtype), checksum(stored), file.name, offset)
            )
            offset = -(-end // ALIGN) * ALIGN
    except BaseException as error:
        publish(link, sender, (), in_words(error))
        raise
    publish(link, sender, entries)


def receive(link: Link, receiver: int = 0) -> "Iterator[tuple[str, torch.Tensor]]":
    """Give every tensor as a view of the file, to be copied before the next is asked for.

    Raises `RefitError` for a missing, stale, contradictory or damaged hand-over.
    """
    manifests = await_manifests(link)
    for manifest in manifests:
        for entry in manifest.entries:
            yield entry.name, _read(link, entry)
    still_current(link, manifests)


def _write(file: Path, offset: int, tensor: "torch.Tensor", dtype: str) -> "tuple[torch.Tensor, int]":
    import torch

    kind = getattr(torch, dtype) if dtype else tensor.dtype
    end = offset + tensor.numel() * kind.itemsize
    mapping = _mappings.get((file, "send"))
    if mapping is None or not file.exists() or mapping.inode != file.stat().st_ino or mapping.data.numel() < end:
        mapping = _grow(file, end)
    stored = mapping.data[offset:end].view(kind).view(tensor.shape)
    stored.copy_(tensor.detach())
    return stored, end


def _grow(file: Path, size: int) -> _Mapping:
    size = -(-size // GROW) * GROW if size > GROW else max(size, ALIGN)
    with file.open("ab") as stream:
        try:
            # Reserve the pages: writing to a mapped page that a full memory file system lacks kills the process.
            os.posix_fallocate(stream.fileno(), 0, size)
        except OSError as error:
            raise RefitError(
                f"{file} cannot grow to {size / 1e6:.0f} MB: {error.strerror}; make room in {file.parent} or use the "
                "transport `disk`"
            ) from error
    return _map(file, "send")


def _map(file: Path, end: str) -> _Mapping:
    import torch

    status = file.stat()
    data = torch.from_file(str(file), shared=True, size=status.st_size, dtype=torch.uint8)
    mapping = _mappings[file, end] = _Mapping(status.st_ino, data)
    return mapping


def _read(link: Link, entry: Entry) -> "torch.Tensor":
    import torch

    file = Path(link.address) / entry.file
    dtype: torch.dtype = getattr(torch, entry.dtype)
    end = entry.offset + dtype.itemsize * torch.Size(entry.shape).numel()
    try:
        status = file.stat()
    except FileNotFoundError:
        raise damaged(link, entry, "the file is gone") from None
    if status.st_size < end:
        raise damaged(link, entry, f"the file has {status.st_size} bytes, wanted {end}")
    mapping = _mappings.get((file, "receive"))
    if mapping is None or mapping.inode != status.st_ino or mapping.data.numel() != status.st_size:
        mapping = _map(file, "receive")
    tensor: torch.Tensor = mapping.data[entry.offset : end].view(dtype).view(entry.shape)
    found = checksum(tensor)
    if found != entry.checksum:
        raise damaged(link, entry, f"checksum {found:08x}, wanted {entry.checksum:08x}")
    return tensor
