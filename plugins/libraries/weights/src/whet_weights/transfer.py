"""What both ends of a weight sync call, in their workers, with the spec that the driver made.

    send(spec, [(name, tensor), ...])        for name, tensor in receive(spec): ...

`receive` is checked: it ends without an error only after it has yielded everything that the senders sent, undamaged.
The receiver itself checks what a model needs beyond that (every parameter present, shapes equal).
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec

if TYPE_CHECKING:
    import torch

TRANSPORTS = {
    "shared": "shared",
    "cuda-ipc": "cuda_ipc",
    "broadcast": "broadcast",
    "shared-memory": "shared_memory",
    "disk": "disk",
}
"""Transports and their modules. All but `shared` keep what was sent until the next session begins, so that a receiver
that comes late, or a second time, gets it too."""


def send(spec: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int = 0) -> None:
    """Send the weights of one sender: (Hugging Face name, full tensor), each name from exactly one sender.

    Does not wait for receivers, except that the transports in `STREAMED` wait a limited time. Tensors are read one at a
    time, so an iterator may gather them as it goes.
    """
    if not 0 <= sender < spec.senders:
        raise WeightSyncError(f"weight sync {spec.session}: sender {sender} of {spec.senders} senders")
    _transport(spec).send(spec, _once_each(spec, weights), sender)


def receive(spec: TransferSpec, receiver: int = 0) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield (name, tensor) of every sender. Copy a tensor before reading the next.

    Raises `WeightSyncError` if the transfer is partial, stale or damaged, or does not come in time. What was copied
    until then must not be used.
    """
    yield from _transport(spec).receive(spec, receiver)


def _transport(spec: TransferSpec) -> ModuleType:
    if spec.transport not in TRANSPORTS:
        raise WeightSyncError(
            f"weight sync {spec.session}: no transport {spec.transport!r}, only {', '.join(TRANSPORTS)}"
        )
    return import_module(f"whet_weights.{TRANSPORTS[spec.transport]}")


def _once_each(
    spec: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]"
) -> "Iterator[tuple[str, torch.Tensor]]":
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise WeightSyncError(f"weight sync {spec.session}: {name} was sent twice")
        seen.add(name)
        yield name, tensor
