"""Weight sync through safetensors files in a folder that both ends see. It works across machines."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from whet.data.files import disk_errors
from whet.errors import in_words
from whet.interfaces.weights import TransferSpec
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

FILE_BYTES = 1 << 30
"""A file is closed when it holds this much. So a sender never holds more than this of the model in memory."""


def send(spec: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int = 0) -> None:
    """Write the tensors, cast to `spec.dtype`, to files of this session, and publish the manifest."""
    withdraw(spec, sender)
    for old in Path(spec.address).glob(f"weights-{sender}-*.safetensors"):
        old.unlink(missing_ok=True)
    entries: list[Entry] = []
    try:
        for number, bucket in enumerate(_buckets(weights, spec.dtype)):
            entries += _write(Path(spec.address) / f"weights-{sender}-{spec.session}-{number}.safetensors", bucket)
    except BaseException as error:
        publish(spec, sender, (), in_words(error))
        raise
    publish(spec, sender, entries)


def receive(spec: TransferSpec, receiver: int = 0) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield every tensor. Raises `WeightSyncError` for a missing, stale, inconsistent or damaged transfer."""
    manifests = await_manifests(spec)
    for manifest in manifests:
        for file in dict.fromkeys(entry.file for entry in manifest.entries):
            yield from _read(spec, file, [entry for entry in manifest.entries if entry.file == file])
    still_current(spec, manifests)


def _buckets(weights: "Iterable[tuple[str, torch.Tensor]]", dtype: str) -> "Iterator[dict[str, torch.Tensor]]":
    import torch

    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        kind = getattr(torch, dtype) if dtype else tensor.dtype
        # A copy: safetensors refuses tensors that share memory, as tied and sliced ones do.
        bucket[name] = tensor.detach().to("cpu", kind, copy=True, memory_format=torch.contiguous_format)
        size += bucket[name].nbytes
        if size >= FILE_BYTES:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def _write(file: Path, bucket: "dict[str, torch.Tensor]") -> list[Entry]:
    from safetensors.torch import save_file

    with disk_errors(file):
        save_file(bucket, file)
    return [
        Entry(name, tuple(tensor.shape), dtype_name(tensor.dtype), checksum(tensor), file.name)
        for name, tensor in bucket.items()
    ]


def _read(spec: TransferSpec, file: str, entries: list[Entry]) -> "Iterator[tuple[str, torch.Tensor]]":
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(spec.address) / file, "pt") as tensors:
            names = set(tensors.keys())
            for entry in entries:
                if entry.name not in names:
                    raise damaged(spec, entry, "the file lacks it")
                tensor = tensors.get_tensor(entry.name)
                found = (tuple(tensor.shape), dtype_name(tensor.dtype), checksum(tensor))
                if found != (entry.shape, entry.dtype, entry.checksum):
                    raise damaged(
                        spec,
                        entry,
                        f"found shape {found[0]}, {found[1]}, checksum {found[2]:08x}, wanted shape {entry.shape}, "
                        f"{entry.dtype}, checksum {entry.checksum:08x}",
                    )
                yield entry.name, tensor
    except (OSError, SafetensorError) as error:
        raise damaged(spec, entries[0], str(error)) from error
