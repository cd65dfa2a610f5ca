"""Releases the memory of tensors for a while. The tensors stay the same objects, but hold no memory meanwhile.

    on a GPU     their bytes wait in pinned memory of the host
    on a CPU     their bytes wait in a file, because the memory to release is the host's own

Code that refers to the tensors (modules, optimizers, views that share their memory) need not change. No code may
read or write the tensors until their memory is back.
"""

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from whet.data.files import disk_errors
from whet.errors import WhetError

if TYPE_CHECKING:
    import torch

_SLAB_BYTES: Final = 1 << 26
_DONTNEED: Final = 4
"""On Linux, this value releases the pages. A later read finds zeros, or the bytes of the file that was mapped there."""


@frozen(eq=False)
class _Pages:
    """Whole pages of this process, within the memory of a tensor."""

    owner: Any
    """The object that keeps the memory where it is."""
    begin: int
    size: int

    def view(self) -> Any:
        return (ctypes.c_char * self.size).from_address(self.begin)

    def release(self) -> int:
        """Release the pages and return their number of bytes."""
        done = ctypes.CDLL(None).madvise(ctypes.c_void_p(self.begin), ctypes.c_size_t(self.size), _DONTNEED)
        return 0 if done else self.size


@frozen(eq=False)
class _OnGpu:
    storage: "torch.UntypedStorage"
    size: int


class Slabs:
    """Host memory for the bytes of other storages. The bytes lie one after another in pieces of a fixed size.

    A GPU reads and writes pinned memory fast. The size of a piece of pinned memory is a power of two, so a piece per
    tensor would take up to twice the bytes. The memory is kept between uses, because pinning takes long.
    """

    def __init__(self, slab_bytes: int = _SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._slabs: list[torch.Tensor] = []

    def take(self, storages: "Sequence[torch.UntypedStorage]") -> None:
        """Start to copy these storages. The copy is complete when their device has finished all its work."""
        whole, rest = divmod(sum(one.nbytes() for one in storages), self._slab_bytes)
        sizes = [self._slab_bytes] * whole + ([1 << (rest - 1).bit_length()] if rest else [])
        for place, size in enumerate(sizes):
            if place == len(self._slabs):
                self._slabs.append(_pinned(size))
            elif len(self._slabs[place]) < size:
                self._slabs[place] = _pinned(size)
        for there, here in self._pieces(storages):
            here.copy_(there, non_blocking=True)

    def give(self, storages: "Sequence[torch.UntypedStorage]") -> None:
        """Copy the bytes back to storages of the same sizes in the same order."""
        for there, here in self._pieces(storages):
            there.copy_(here)

    def _pieces(self, storages: "Sequence[torch.UntypedStorage]") -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
        at = 0
        for one in storages:
            whole, begin = _bytes(one), 0
            while begin < one.nbytes():
                slab, offset = divmod(at, self._slab_bytes)
                size = min(one.nbytes() - begin, self._slab_bytes - offset)
                yield whole[begin : begin + size], self._slabs[slab][offset : offset + size]
                begin, at = begin + size, at + size


class Offload:
    """The released memory of one worker. Not for use by several threads at the same time."""

    def __init__(self, file: Path) -> None:
        """`file` is written when CPU memory is released, and removed when the memory is taken again."""
        self._file = file
        self.used = False
        """Whether memory has ever been released."""
        self._pages: list[_Pages] = []
        self._on_gpu: list[_OnGpu] = []
        self._host = Slabs()

    @property
    def asleep(self) -> bool:
        """Return whether memory is released now."""
        return bool(self._pages or self._on_gpu)

    def sleep(self, tensors: "Iterable[torch.Tensor]") -> int:
        """Release the memory of these tensors and of all tensors that share it. Return the number of released bytes.

        A second call does nothing. If there is no room for the bytes, `WhetError` is raised and the tensors are
        unchanged. CPU memory is released on Linux only.
        """
        if self.asleep:
            return 0
        storages = _storages(tensors)
        pages = [found for one in storages if one.device.type == "cpu" and (found := _pages(one))]
        if pages:
            self._write(pages)
        on_gpu = [_OnGpu(one, one.nbytes()) for one in storages if one.device.type == "cuda"]
        if on_gpu:
            import torch

            self._host.take([one.storage for one in on_gpu])
            torch.cuda.synchronize()
        self._pages, self._on_gpu, self.used = pages, on_gpu, True
        for one in on_gpu:
            one.storage.resize_(0)
        given = sum(one.release() for one in pages)
        trim()
        return given + sum(one.size for one in on_gpu)

    def wake(self, *, contents: bool = True) -> None:
        """Take the memory again, with its contents. A second call does nothing.

        If `contents` is false, the caller must write all of the memory anew.
        """
        if contents and self._pages:
            self._read()
        for one in self._on_gpu:
            one.storage.resize_(one.size)
        if contents:
            self._host.give([one.storage for one in self._on_gpu])
        self._pages, self._on_gpu = [], []
        self.close()

    def close(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)

    def _write(self, pages: list[_Pages]) -> None:
        with disk_errors(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._file.open("wb") as stream:
                    for one in pages:
                        stream.write(one.view())
            except OSError:
                self.close()
                raise

    def _read(self) -> None:
        with disk_errors(self._file), self._file.open("rb") as stream:
            for one in self._pages:
                found = stream.readinto(one.view())
                if found != one.size:
                    raise WhetError(f"{self._file} ends after {found} of the {one.size} bytes of a tensor")


def _pinned(size: int) -> "torch.Tensor":
    """Return host memory. It is pinned if pinned memory is available."""
    import torch

    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(size, dtype=torch.uint8)


def trim() -> None:
    """Release the memory that CUDA and the C library cache in this process."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if release is not None:
        release(0)


def _storages(tensors: "Iterable[torch.Tensor]") -> "list[torch.UntypedStorage]":
    """Return each storage of the tensors once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def _pages(storage: "torch.UntypedStorage") -> _Pages | None:
    """Return the pages that belong to this storage alone, or None if there are none."""
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    return _Pages(storage, begin, size) if size > 0 and sys.platform == "linux" else None


def _bytes(storage: "torch.UntypedStorage") -> "torch.Tensor":
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
