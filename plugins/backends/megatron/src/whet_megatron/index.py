"""The index of a folder in Megatron's format `torch_dist`, read without running code that it holds.

The index is a pickle, which Megatron and torch read with `pickle.load`: whoever wrote it could have anything executed.
Here it may name the classes below and no other, so what passes may then be read by Megatron.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.errors import CheckpointError

CHECKPOINT = "torch.distributed.checkpoint."
CLASSES = frozenset(
    (module, name)
    for module, names in {
        f"{CHECKPOINT}metadata": "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata "
        "TensorProperties ChunkStorageMetadata _MEM_FORMAT_ENCODING",
        f"{CHECKPOINT}planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
        f"{CHECKPOINT}filesystem": "_StorageInfo _StoragePrefix",
        "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
        "torch": "Size device",
        "torch.serialization": "_get_layout",
        "collections": "OrderedDict",
    }.items()
    for name in names.split()
)
"""What an index may name, and torch's dtypes. None of these runs code that the file holds."""
PATHS = frozenset((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath"))
"""Some writers note in an index where they wrote it. Nothing here reads that, so it becomes a text."""
FILE = ".metadata"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what an index may name."""
        if (module, name) in CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) in PATHS:
            return _path
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs and which could run any code")


def _path(*parts: str) -> str:
    return "/".join(parts)


def read_index(folder: Path) -> Any:
    """Return the index of a folder, torch's `Metadata`.

    Raises `CheckpointError` if there is none, if it names anything beside its own classes, or if files lack or are
    shorter than it says: they are read in place.
    """
    try:
        with (folder / FILE).open("rb") as stream:
            found = _Unpickler(stream).load()
        parts = {at: (part.relative_path, part.offset, part.length) for at, part in found.storage_data.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder} cannot be loaded: it holds no {FILE}, the index of `torch_dist`") from None
    except Exception as error:  # of the file system, and of whatever the file holds
        raise CheckpointError(f"{folder / FILE} cannot be loaded: {error}") from error
    ends: dict[str, int] = {}
    for path, offset, length in parts.values():
        if Path(path).name != path:
            raise CheckpointError(
                f"{folder / FILE} cannot be loaded: it names the file {path!r:.120}, wanted one beside it"
            )
        ends[path] = max(ends.get(path, 0), offset + length)
    for path, end in ends.items():
        size = (folder / path).stat().st_size if (folder / path).is_file() else 0
        if size < end:
            raise CheckpointError(f"{folder / path} cannot be loaded: it has {size:,} bytes, wanted {end:,}")
    return found


def read_slice(folder: Path, index: Any, name: str, lead: tuple[int, ...] = ()) -> Tensor:
    """Return a tensor of a folder, or that of a layer or an expert: `lead` are its numbers in the first dimensions."""
    what = index.state_dict_metadata.get(name)
    if not hasattr(what, "chunks"):
        raise CheckpointError(f"{folder} holds no tensor {name}")
    if len(what.size) < len(lead) or any(number >= size for number, size in zip(lead, what.size, strict=False)):
        raise CheckpointError(f"{folder} holds {name} as {list(what.size)}, which has no part {list(lead)}")
    found = torch.empty(what.size[len(lead) :], dtype=what.properties.dtype)
    missing = found.numel()
    for part, place, chunk in _chunks(index, name, lead):
        values = _loaded(folder, part, name)
        for number, begin in zip(lead, place, strict=False):
            values = values[number - begin]
        where = [slice(begin, begin + size) for begin, size in list(zip(place, chunk, strict=True))[len(lead) :]]
        found[tuple(where)] = values
        missing -= values.numel()
    if missing > 0:
        raise CheckpointError(f"{folder} cannot be loaded: its {FILE} has no place for {missing:,} numbers of {name}")
    return found


def _chunks(index: Any, name: str, lead: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
    """Yield the place in a file, the offsets and the sizes of each chunk that has a part of a tensor."""
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in index.state_dict_metadata[name].chunks}
    for at, part in index.storage_data.items():
        if at.fqn == name:
            place = tuple(at.offset)
            chunk = sizes[place]
            if all(begin <= number < begin + size for number, begin, size in zip(lead, place, chunk, strict=False)):
                yield part, place, chunk


def _loaded(folder: Path, part: Any, name: str) -> Any:
    """Return what a part of a file holds: tensors and builtins, nothing that runs code."""
    try:
        with (folder / part.relative_path).open("rb") as stream:
            stream.seek(part.offset)
            return torch.load(io.BytesIO(stream.read(part.length)), map_location="cpu", weights_only=True)
    except Exception as error:  # of the file system, of torch, and of whatever the file holds
        raise CheckpointError(f"{folder / part.relative_path} cannot be loaded: {name}: {error}") from error
