"""Weight sync within one process: tensors pass by reference, and the receiver copies them.

Both ends may run one after the other on one thread, the sender first: it leaves its tensors in a table and returns.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from attrs import define, field

from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec

if TYPE_CHECKING:
    import torch


@define
class _Offer:
    session: str
    version: int
    weights: "dict[int, list[tuple[str, torch.Tensor]]]" = field(factory=dict)
    """Tensors by sender."""
    taken: int = 0


_offers: dict[str, _Offer] = {}
"""Offers by address. A later session replaces an earlier one."""
_changed = threading.Condition()


def send(spec: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int = 0) -> None:
    """Leave the tensors for receivers of this process. They must not change until the weight sync is over."""
    tensors = list(weights)
    with _changed:
        offer = _offers.get(spec.address)
        if offer is None or offer.session != spec.session:
            offer = _offers[spec.address] = _Offer(spec.session, spec.version)
        offer.weights[sender] = tensors
        _changed.notify_all()


def receive(spec: TransferSpec, receiver: int = 0) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield every tensor that this process's senders left. Raises `WeightSyncError` if none of this session comes."""
    with _changed:
        offer = _await(spec)
        if offer.version != spec.version:
            raise WeightSyncError(
                f"weight sync {spec.session}: the sender sent version {offer.version}, wanted {spec.version}"
            )
        seen: set[str] = set()
        tensors = [item for sender in sorted(offer.weights) for item in offer.weights[sender]]
    for name, tensor in tensors:
        if name in seen:
            raise WeightSyncError(f"weight sync {spec.session}: {name} came twice")
        seen.add(name)
        yield name, tensor
    with _changed:
        offer.taken += 1
        if offer.taken >= spec.receivers and _offers.get(spec.address) is offer:
            del _offers[spec.address]


def _await(spec: TransferSpec) -> _Offer:
    deadline = time.monotonic() + spec.timeout_seconds
    while True:
        offer = _offers.get(spec.address)
        if offer is not None and offer.session == spec.session:
            return offer
        left = deadline - time.monotonic()
        if left <= 0:
            found = f"session {offer.session} of version {offer.version}" if offer else "nothing"
            raise WeightSyncError(
                f"weight sync {spec.session} of version {spec.version}: after {spec.timeout_seconds:g} s this process "
                f"holds {found} at {spec.address!r}; the sender must run before the receiver and in its process"
            )
        _changed.wait(left)
