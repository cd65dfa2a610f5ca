"""Writes a checkpoint in three acts, so that training waits for the first alone.

plan       every rank   Megatron plans who writes what, with collectives
write      every rank   writes its file; on a thread, from copies
complete   rank 0       writes the index of all files and what is said of them in JSON
"""

import json
import queue
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from whet.data.files import disk_errors, fsync

INDEX, TENSORS = "backend.json", "megatron"
SMALL = 1 << 20
"""Bytes of a tensor that is copied without asking whose it is."""


@frozen(eq=False)
class Planned:
    """What this rank writes of a checkpoint."""

    folder: Path
    buckets: list[Any]
    """Megatron's: of each file its path, its name, and (bytes, tensors) with their descriptions."""
    writer: Any
    index: Any
    """On rank 0 the index, without the places in the files."""
    document: dict[str, Any]
    """`backend.json`."""

    def shared_with(self, held: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
        """Return the tensors, by their place, that would change with those that training changes."""
        live = {one.untyped_storage().data_ptr() for one in held}
        return [
            (place, tensor) for place, tensor in self._tensors()
            if tensor.device.type != "cpu" or tensor.nbytes < SMALL or tensor.untyped_storage().data_ptr() in live
        ]  # fmt: skip

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, (_, _, (_, tensors)) in enumerate(self.buckets):
            yield from ((f"{number}/{place}", tensor) for place, (_, tensor) in enumerate(tensors))

    def write(self, copies: Iterable[tuple[str, Tensor]] = ()) -> list[list[Any]]:
        """Write the files of this rank, with copies in the place of some tensors. Return where everything is in them.

        Megatron's own function does so in forked processes, which fork threads that hold locks.
        """
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        copied, written = dict(copies), list[Any]()
        changes = [self.writer.transforms] if hasattr(self.writer, "transforms") else []
        for number, (path, name, (objects, tensors)) in enumerate(self.buckets):
            found: queue.SimpleQueue[Any] = queue.SimpleQueue()
            counted: queue.Queue[int] = queue.Queue()
            counted.put(number)
            here = [
                (item, copied.get(f"{number}/{place}", tensor).cpu()) for place, (item, tensor) in enumerate(tensors)
            ]
            with disk_errors(Path(path)):
                bucket = path, name, (objects, here)
                FileSystemWriterAsync.write_preloaded_data(changes, number, bucket, found, counted, use_fsync=True)
                _, results = found.get()
                if isinstance(results, Exception):
                    raise results
            written += results
        return [_plain(one) for one in written]

    def complete(self, written: Sequence[Sequence[list[Any]]]) -> None:
        """Write the index of the files of all ranks, in their order. Only then the checkpoint can be loaded."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        tensors = self.folder / TENSORS
        with disk_errors(tensors):
            self.writer.finish(self.index, [[_result(one) for one in of_rank] for of_rank in written])
            save_config(CheckpointingConfig("torch_dist", 1), str(tensors))
            (self.folder / INDEX).write_text(json.dumps(self.document, indent=1), encoding="utf-8")
            for path in (*tensors.iterdir(), self.folder / INDEX):
                fsync(path)


def plan(folder: Path, state: dict[str, Any], document: dict[str, Any]) -> Planned:
    """Plan a checkpoint of what Megatron describes, and write what every rank knows. Every rank must take part."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    tensors, found = folder / TENSORS, list[Any]()

    class Strategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron has no types
        """Keeps what Megatron hides in the functions that it returns."""

        def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> Any:
            found.extend((writer, planned[1]))
            return super()._get_save_and_finalize_callbacks(writer, planned)

    if torch.distributed.get_rank() == 0:
        with disk_errors(tensors):
            tensors.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    with disk_errors(tensors):
        dist_checkpointing.save(
            state, str(tensors), Strategy("torch_dist", 1, thread_count=1), validate_access_integrity=True,
            async_sharded_save=True,
        )  # fmt: skip
    writer, index = found
    return Planned(folder, writer.write_buckets, writer, index, document)


def _plain(result: Any) -> list[Any]:
    """Return the description of something that was written, as builtins."""
    at, info = result.index, result.storage_data
    offset = None if at.offset is None else list(at.offset)
    return [at.fqn, offset, at.index, result.size_in_bytes, info.relative_path, info.offset, info.length]


def _result(plain: Sequence[Any]) -> Any:
    """Return a description as torch has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    name, offset, number, size, path, begin, length = plain
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return WriteResult(index=index, size_in_bytes=size, storage_data=_StorageInfo(path, begin, length))
