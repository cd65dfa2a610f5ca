"""A policy's weights and optimizer state as safetensors with JSON indices. No pickle; any tool can read the files.

    backend.json                  rank 0: number of ranks, optimizer and its steps, the backend that wrote it; and
                                  its tensors: key -> shape, dtype, file
    rank-0001.json                rank 1: its tensors
    tensors-00001.safetensors     of rank 0
    rank-0001-tensors-00001.safetensors

Every rank writes the numbers that it holds, so no rank gathers a tensor. A key is the name of a tensor, or `name@8,0`
for a part of it that begins at row 8. A checkpoint loads on any number of ranks and with any parallelism: each rank
reads the regions that it needs. `torch.distributed.checkpoint` is not used: its index is a pickle, and its writer of
safetensors holds a rank's whole file in memory, and cannot write two regions of one tensor.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from whet.data.files import disk_errors, fsync, use_umask
from whet.errors import CheckpointError
from whet_fsdp2.regions import Region, regions, writes

FORMAT = 2
READABLE = (1, 2)
"""Format 1 holds whole tensors, all written by rank 0."""
STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "adamw_8bit": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}
"""The moments of each kind of optimizer for a weight."""
_MOMENTS = {moment for moments in STATE.values() for moment in moments}
_FINITE = {"weights", *_MOMENTS, *(f"{moment}_scale" for moment in _MOMENTS)}
"""Prefixes of the tensors whose values must be finite. A buffer may be a mask of infinities."""
INDEX = "backend.json"
FILE_BYTES = 2 << 30
"""A file is written as soon as the collected tensors reach this size."""


def parts(name: str, tensor: Tensor, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a tensor that this rank writes, by their keys."""
    if not writes(tensor, rank):
        return
    for region, part in regions(tensor):
        whole = part.shape == tensor.shape
        yield name if whole else f"{name}@{','.join(map(str, region.begin))}", part


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, extra: Mapping[str, Any], rank: int) -> None:
    """Write the parts of one rank durably. Rank 0 writes `extra` into its index."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"rank-{rank:04d}"
    index: dict[str, Any] = {}
    for number, chunk in enumerate(_chunks(tensors), 1):
        name = f"{stem + '-' if rank else ''}tensors-{number:05d}.safetensors"
        with disk_errors(folder / name):
            _write_file(folder / name, chunk)
        for key, tensor in chunk.items():
            index[key] = {"file": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    document = {"format": FORMAT, **({} if rank else extra), "tensors": index}
    path = folder / (f"{stem}.json" if rank else INDEX)
    with disk_errors(path):
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")
        fsync(path)
    fsync(folder)


def _chunks(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        chunk[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.numel() * tensor.element_size()
        if size >= FILE_BYTES:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
    use_umask(path)
    fsync(path)


@frozen
class _Part:
    """A part of a tensor in a file."""

    key: str
    region: Region
    dtype: str
    file: str


class Saved:
    """A checkpoint folder that `write` made. Raises `CheckpointError` if the checkpoint is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        document = self._index(INDEX)
        try:
            self.steps: dict[str, float] = {name: float(step) for name, step in document["steps"].items()}
            """Optimizer steps of each weight that the optimizer has updated."""
            self.optimizer_steps = int(document["optimizer_steps"])
            self.optimizer = str(document.get("optimizer", "adamw"))
            """The kind of optimizer that this is the state of. Checkpoints that do not name it are of AdamW."""
            if not all(0 <= step < math.inf for step in (*self.steps.values(), self.optimizer_steps)):
                raise ValueError("its numbers of optimizer steps must be finite and not negative")
            ranks = int(document.get("ranks", 1))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{folder / INDEX} cannot be read: {error!r}") from error
        self._parts: dict[str, list[_Part]] = {}
        self._list(document, INDEX)
        for rank in range(1, ranks):
            name = f"rank-{rank:04d}.json"
            self._list(self._index(name), name)

    def _index(self, name: str) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads((self.folder / name).read_text(encoding="utf-8"))
            found = document["format"]
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder} holds no {name}, so it is no checkpoint of this backend, or an incomplete one"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.folder / name} cannot be read: {error!r}") from error
        if found not in READABLE:
            raise CheckpointError(
                f"{self.folder / name} has format {found}, wanted {FORMAT}; load it with the whet of then"
            )
        return document

    def _list(self, document: Mapping[str, Any], index: str) -> None:
        try:
            for key, entry in document["tensors"].items():
                name, _, begin = key.partition("@")
                size = tuple(int(n) for n in entry["shape"])
                first = tuple(int(n) for n in begin.split(",")) if begin else (0,) * len(size)
                if len(first) != len(size) or min((*first, *size), default=0) < 0:
                    raise ValueError(f"{key} cannot have the shape {size}")
                part = _Part(key, Region(first, size), str(entry["dtype"]), Path(entry["file"]).name)
                self._parts.setdefault(name, []).append(part)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{self.folder / index} cannot be read: {error!r}") from error

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors of a kind: `weights`, `buffers`, or a moment."""
        return [name.partition("/")[2] for name in self._parts if name.startswith(f"{kind}/")]

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return name in self._parts

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor, as far as its parts reach."""
        ends = [[b + s for b, s in zip(p.region.begin, p.region.size, strict=True)] for p in self._parts[name]]
        return [max(column) for column in zip(*ends, strict=True)]

    def refuse_others(self, wanted: Mapping[str, Iterable[int]]) -> None:
        """Raise `CheckpointError`, with the first differences, unless the weights have the wanted names and shapes."""
        found = {f"weights/{name}": self.shape(f"weights/{name}") for name in self.names("weights")}
        expected = {name: list(shape) for name, shape in wanted.items()}
        problems = [f"{n} is missing" for n in expected if n not in found]
        problems += [f"{n} is not in the model" for n in found if n not in expected]
        problems += [
            f"{n} has shape {found[n]}, the model has {expected[n]}"
            for n in expected
            if n in found and found[n] != expected[n]
        ]
        if problems:
            more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise CheckpointError(f"{self.folder} is of another model: {'; '.join(problems[:4])}{more}")

    def read_into(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill this rank's shards of the named tensors. Only the regions that it holds are read."""
        by_file: dict[str, list[tuple[_Part, Region, Region, Tensor]]] = {}
        for name, tensor in tensors:
            if name not in self._parts:
                raise CheckpointError(f"{self.folder / INDEX} does not list {name}: the checkpoint is incomplete")
            for region, target in regions(tensor):
                left = target.numel()
                for part in self._parts[name]:
                    if (shared := region.overlap(part.region)) is not None or not target.ndim:
                        shared = shared or region
                        by_file.setdefault(part.file, []).append((part, shared, region, target))
                        left -= math.prod(shared.size)
                if left:
                    words = f"{left} of {target.numel()} values of {name}, from {list(region.begin)} on, are missing"
                    raise CheckpointError(f"{self.folder}: {words}: the checkpoint is incomplete or damaged")
        for file, members in by_file.items():
            self._fill(self.folder / file, members)

    def _fill(self, path: Path, members: list[tuple[_Part, Region, Region, Tensor]]) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as stream:
                for part, shared, region, target in members:
                    stored = stream.get_slice(part.key)
                    shape, dtype = tuple(stored.get_shape()), getattr(torch, part.dtype, None)
                    value = stored[shared.within(part.region)] if shape else stream.get_tensor(part.key)
                    if shape != part.region.size or value.dtype != dtype:
                        words = f"holds {part.key} as {value.dtype} {list(shape)}, its index says {part}"
                        raise CheckpointError(f"{path} {words}")
                    _refuse_impossible(path, part.key, value)
                    target[shared.within(region)].copy_(value)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


def _refuse_impossible(path: Path, name: str, tensor: Tensor) -> None:
    if name.partition("/")[0] in _FINITE and not torch.isfinite(tensor).all():
        count = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"{path} holds {name} with {count} of {tensor.numel()} values that are not finite: nothing can be trained "
            "on from there; delete the checkpoint's folder to resume from the checkpoint before it"
        )
    if name.startswith("exp_avg_sq/") and (tensor < 0).any():
        raise CheckpointError(f"{path} holds {name} with values below 0, and it is a mean of squares")
