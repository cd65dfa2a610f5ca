"""The records of a weight sync. A `TransferSpec` identifies one transfer; its manifest proves that all of it arrived.

Senders and receivers meet through the driver, which makes one `TransferSpec` per transfer and sends it to both:

    driver    spec = TransferSpec(transport, address, session, version, dtype)
    backend   send_weights(spec)    -> TRANSPORT.send(spec, stream of (name, tensor), sender, senders)
    generator receive_weights(spec) -> TRANSPORT.receive(spec) yields (name, tensor), checked
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import field, frozen

if TYPE_CHECKING:
    from whet.data.metrics import Metric
    from whet.data.records import Completion, Request

STREAMED = ("cuda-ipc", "broadcast")
"""Transports that yield tensors on a GPU, one bucket at a time: a receiver has no room to hold all of them. Both ends
find each other through the driver's exchange."""


@frozen
class TransferSpec:
    """One transfer of weights. It is complete or refused."""

    transport: str
    """`shared` (same process), `cuda-ipc` (same GPU), `broadcast` (same network), `shared-memory` (any nodes of a run),
    `disk` (same file system)."""
    address: str
    """For `shared-memory` and `disk`, a folder. For `shared`, a key within the process. For the other transports,
    `host:port` of the driver's exchange."""
    session: str
    """A fresh name for this transfer. Both ends check it."""
    version: int
    """Version of the weights: the number of the step that made them; 0 for the weights loaded at the start."""
    dtype: str = ""
    """The dtype that the receiver wants, e.g. `float32`. Empty: the dtype that the sender holds."""
    senders: int = 1
    """How many workers send. Each weight comes from exactly one of them."""
    receivers: int = 1
    """How many receivers a sender waits for. `broadcast`: all of them. `cuda-ipc`: those on the sender's GPU. `shared`:
    how many receivers take the weights."""
    timeout_seconds: float = 300.0
    token: str = field(default="", repr=False)
    """A secret that both ends must know, in hexadecimal digits. Used by transports that meet through the exchange."""
    kept: bool = True
    """For `broadcast` and `cuda-ipc`: whether senders keep a copy for receivers that come late."""


Link = TransferSpec
"""The name of before, for one version."""


@frozen
class Copy:
    """The copy of a memory on a node."""

    name: str = ""
    """Its name, by which receivers on the node open it."""
    failure: str = ""
    """Why there is no copy."""


CopyMemory = Callable[[str, int, str, Collection[str], float], Mapping[str, Copy]]
"""(memory, its size, its node, nodes that have a copy already, seconds) -> copies by node."""


class TransportDriver(Protocol):
    """The driver's part of a transport. A distribution names it by an entry point, and workers have the other parts:

        [project.entry-points."whet.transports"]
        disk = "its_package.driver:Files"     # called with (spec, address, copy_memory)

    The `spec` has an address in the scratch folder of the run; `address()` is that of the driver's
    machine.
    """

    spec: TransferSpec
    """What all transfers of a run share. It has no session and no version."""

    def carry(self, spec: TransferSpec) -> None:
        """Bring what the senders of a transfer sent to where receivers find it. They are done, receivers may wait."""
        ...

    def close(self) -> None:
        """Release what the driver holds."""
        ...


class Proof(Protocol):
    """Proves that a replica has the weights of a version; see `Probe`."""

    def requests(self, replica: int) -> "list[Request]":
        """Return the requests that the replica has to answer."""
        ...

    def check(self, replica: int, completions: "Sequence[Completion]") -> float:
        """Return the mean absolute difference of a replica's logprobs from the trainer's, in nats.

        Raises `WeightSyncError` if the replica does not have the weights.
        """
        ...


class Probe(Protocol):
    """Checks after weight syncs that each replica of the generator computes with the trainer's weights.

    A distribution names it by an entry point. It is called as in `whet.run.weight_sync.make_probe`:

        [project.entry-points."whet.probes"]
        logprobs = "its_package.probe:Probe"
    """

    overdue: bool
    """Whether a replica came back to weights that were not checked."""

    def due(self, version: int) -> bool:
        """Return whether this weight sync, the next of this run attempt, must be checked."""
        ...

    def __call__(self, version: int) -> Proof | None:
        """Check all replicas that are present, while the trainer still holds the weights that it sent.

        Return the proof that restarted replicas must pass, or None if no replica is present. Raises `WeightSyncError`.
        """
        ...

    def metrics(self) -> "dict[str, Metric]":
        """Return the metrics of the checks since the last call."""
        ...
