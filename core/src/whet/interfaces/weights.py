"""A transfer spec describes one weight sync; a manifest proves that all weights arrived.

Senders and receivers meet through the driver, which makes a `TransferSpec` for each weight sync and gives it to both:

    driver    link = TransferSpec(transport, address, session, version, dtype)
    backend   send_weights(link)    -> whet.weights.TRANSPORT.send(link, stream of (name, tensor), sender, senders)
    generator receive_weights(link) -> whet.weights.TRANSPORT.receive(link) gives (name, tensor), checked
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

if TYPE_CHECKING:
    from whet.data.records import Completion, Request

Places = tuple[Mapping[str, Any], ...]
"""What each sender said of where it is: `sender`, `address`, `place`."""


@frozen
class TransferSpec:
    """One weight sync: complete or refused."""

    transport: str
    """`shared` (same process), `cuda-ipc` (same GPU), `shared-memory` (same host), `broadcast` and `tcp` (same
    network), `disk` (same file system)."""
    address: str
    """Of shared-memory and disk: a folder. Of shared: a key within the process. Of the others: `host:port` of the
    driver's exchange."""
    session: str
    """A fresh name for this weight sync; both ends check it."""
    version: int
    """Version of the weights: the number of the step that made them; 0 for those loaded."""
    dtype: str = ""
    """What the receiver wants, e.g. `float32`; empty: as the sender holds them."""
    senders: int = 1
    """How many workers send; each name comes from exactly one."""
    receivers: int = 1
    """How many a sender waits for, of broadcast all, of cuda-ipc those on its GPU; of shared how many take it."""
    timeout_seconds: float = 300.0
    token: str = field(default="", repr=False)
    """Of what goes by the exchange: what both ends must know, in hexadecimal digits."""
    places: Places = field(default=(), hash=False)
    """Of tcp: where senders were at the weight sync before. If they are not all there, receivers ask the exchange."""
    kept: bool = True
    """Of broadcast and cuda-ipc: whether senders keep a copy for receivers that come late."""


Link = TransferSpec
"""The name of before, for one version."""


class Proof(Protocol):
    """What a replica has to show for its weights to be those of a version; see `whet.weights.probe`."""

    def requests(self, replica: int) -> "list[Request]":
        """Return what a replica is asked."""
        ...

    def check(self, replica: int, completions: "Sequence[Completion]") -> float:
        """Return the mean |replica's logprobs - trainer's logprobs| in nats. Raises `WeightSyncError`."""
        ...
