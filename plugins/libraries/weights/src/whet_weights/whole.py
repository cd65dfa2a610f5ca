"""Checks that a weight sync brings an engine every tensor of the model folder, in its shape, and nothing else.

Engines do not check this themselves: they keep the old weights of a layer that was not sent, make up numbers for the
rest of a fused layer, or accept `lm_head.weight` alone as a success.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.data.bounded import MODEL_VALUES, loads
from whet.data.model_info import weight_files
from whet.errors import WeightSyncError
from whet.interfaces.weights import STREAMED, TransferSpec
from whet_weights.transfer import receive

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
LONGEST_HEADER = 100_000_000
DERIVED = "rotary_emb.inv_freq"
"""Old checkpoints hold these tensors, and every model computes them."""
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


def stored_shapes(folder: str | Path) -> dict[str, Shape]:
    """Return names and shapes of all tensors of a model folder, from the headers of its weight files."""
    found: dict[str, Shape] = {}
    for file in weight_files(folder):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > LONGEST_HEADER:
                raise WeightSyncError(f"{file} is no safetensors file: its header would have {length:,} bytes")
            try:
                header = loads(stream.read(length), MODEL_VALUES)
            except ValueError as error:
                raise WeightSyncError(f"{file} is no safetensors file: {error}") from error
        found |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return found


def check_whole(sent: Iterable[tuple[str, Shape]], stored: Mapping[str, Shape], *, tied: bool) -> None:
    """Raise `WeightSyncError` unless the folder's tensors were sent. tied: the output layer is the embedding."""
    seen: dict[str, Shape] = {}
    for name, shape in sent:
        if name in seen:
            raise WeightSyncError(f"{name} was sent twice")
        if name in stored and shape != stored[name]:
            raise WeightSyncError(f"{name} was sent with shape {shape}, wanted {stored[name]}")
        seen[name] = shape
    free = {name for name in {*stored, *seen} if name.endswith(DERIVED) or (tied and name.endswith(HEAD))}
    if unknown := sorted(seen.keys() - stored.keys() - free):
        raise WeightSyncError(f"the model folder has no {_listed(unknown)}, but that was sent")
    if missing := sorted(stored.keys() - seen.keys() - free):
        raise WeightSyncError(f"{len(missing)} parameters were not sent: {_listed(missing)}")


def failure_among(reports: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Return why an engine's processes refused the weights (empty: none did), and whether the weights are now mixed.

    Each process reports `failure`, empty if it received the weights, and `spoilt`: whether it has only some of them.
    """
    failures = [str(report["failure"]) for report in reports if report["failure"]]
    spoilt = any(report["spoilt"] or not report["failure"] for report in reports)
    return (failures[0], spoilt) if failures else ("", False)


def receive_whole(
    spec: TransferSpec, receiver: int, stored: Mapping[str, Shape], *, tied: bool
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Start to receive weights. They must have the names and shapes of a model folder. Return the tensors; an engine
    may keep them.

    Raises `WeightSyncError` at once, before the first tensor is returned. For streamed transports, the check that
    nothing is missing comes after the last tensor.
    """
    if spec.transport not in STREAMED:
        tensors = list(receive(spec, receiver))
        check_whole([(name, tuple(tensor.shape)) for name, tensor in tensors], stored, tied=tied)
        return iter(tensors)
    arriving = receive(spec, receiver)
    first = list(islice(arriving, 1))
    return _copied(chain(first, arriving), stored, tied)


def _copied(
    tensors: "Iterable[tuple[str, torch.Tensor]]", stored: Mapping[str, Shape], tied: bool
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield copies, because a streamed tensor is overwritten by the next bucket. After the last one, check that none is
    missing.
    """
    sent = []
    for name, tensor in tensors:
        sent.append((name, tuple(tensor.shape)))
        yield name, tensor.clone()
    check_whole(sent, stored, tied=tied)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
