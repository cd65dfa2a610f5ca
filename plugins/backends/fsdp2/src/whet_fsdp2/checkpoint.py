"""A policy's weights and optimizer state as safetensors with a JSON index. No pickle; any tool can read the files.

    backend.json             index: name -> shape, dtype, file; optimizer and its steps; the backend that wrote it
    tensors-00001.safetensors ...

Each tensor is stored whole, so a checkpoint loads on any number of ranks. Every rank takes part in the gathering;
rank 0 writes.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.data.files import disk_errors, use_umask
from whet.errors import CheckpointError

FORMAT = 1
STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}
"""The tensors that each kind of optimizer holds for a weight."""
_FINITE = ("weights", *(moment for moments in STATE.values() for moment in moments))
"""Prefixes of the tensors whose values must be finite. A buffer may be a mask of infinities."""
INDEX = "backend.json"
FILE_BYTES = 2 << 30
"""A file is written as soon as the collected tensors reach this size."""


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, extra: Mapping[str, Any], writes: bool) -> None:
    """Write tensors, and `extra` into the index, durably. Ranks that do not write still take part in the gathering."""
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for number, chunk in enumerate(_chunks(tensors), 1):
        name = f"tensors-{number:05d}.safetensors"
        if writes:
            with disk_errors(folder / name):
                _write_file(folder / name, chunk)
        for key, tensor in chunk.items():
            index[key] = {"file": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if writes:
        document = {"format": FORMAT, **extra, "tensors": index}
        with disk_errors(folder / INDEX), (folder / INDEX).open("w", encoding="utf-8") as stream:
            json.dump(document, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(folder)


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
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Saved:
    """A checkpoint folder that `write` made. Raises `CheckpointError` if the checkpoint is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            document = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            self.tensors: dict[str, Any] = document["tensors"]
            format_ = document["format"]
            self.steps: dict[str, float] = {name: float(step) for name, step in document["steps"].items()}
            """Optimizer steps of each weight that the optimizer has updated."""
            self.optimizer_steps = int(document["optimizer_steps"])
            self.optimizer = str(document.get("optimizer", "adamw"))
            """The kind of optimizer that this is the state of. Checkpoints that do not name it are of AdamW."""
            if not all(0 <= step < math.inf for step in (*self.steps.values(), self.optimizer_steps)):
                raise ValueError("its numbers of optimizer steps must be finite and not negative")
            for entry in self.tensors.values():
                _ = Path(entry["file"]), list(entry["shape"]), str(entry["dtype"])
        except FileNotFoundError:
            raise CheckpointError(f"{folder} holds no {INDEX}, so it is no checkpoint of this backend") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{folder / INDEX} cannot be read: {error!r}") from error
        if format_ != FORMAT:
            raise CheckpointError(
                f"{folder / INDEX} has format {format_}, wanted {FORMAT}; load it with the whet of then"
            )

    def refuse_others(self, wanted: Mapping[str, Iterable[int]]) -> None:
        """Raise `CheckpointError`, with the first differences, unless the weights have the wanted names and shapes."""
        found = {name: list(entry["shape"]) for name, entry in self.tensors.items() if name.startswith("weights/")}
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

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors, file by file."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[str, list[str]] = {}
        for name in names:
            if name not in self.tensors:
                raise CheckpointError(f"{self.folder / INDEX} does not list {name}: the checkpoint is incomplete")
            by_file.setdefault(str(self.tensors[name]["file"]), []).append(name)
        for file, members in by_file.items():
            path = self.folder / Path(file).name
            try:
                with safe_open(path, framework="pt") as stream:
                    for name in members:
                        yield name, _checked(path, name, stream.get_tensor(name), self.tensors[name])
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error


def _checked(path: Path, name: str, tensor: Tensor, entry: Mapping[str, Any]) -> Tensor:
    if list(tensor.shape) != list(entry["shape"]) or tensor.dtype != getattr(torch, str(entry["dtype"]), None):
        raise CheckpointError(f"{path} holds {name} as {tensor.dtype} {list(tensor.shape)}, its index says {entry}")
    if name.partition("/")[0] in _FINITE and not torch.isfinite(tensor).all():
        count = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"{path} holds {name} with {count} of {tensor.numel()} values that are not finite: nothing can be trained "
            "on from there; delete the checkpoint's folder to resume from the checkpoint before it"
        )
    if name.startswith("exp_avg_sq/") and (tensor < 0).any():
        raise CheckpointError(f"{path} holds {name} with values below 0, and it is a mean of squares")
    return tensor
