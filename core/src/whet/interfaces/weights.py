"""The records of a weight sync. A `TransferSpec` identifies one transfer. Its manifest proves that all weights arrived.

For each transfer, the driver makes one `TransferSpec` and sends it to the senders and the receivers:

    driver    spec = TransferSpec(transport, address, session, version, dtype)
    backend   send_weights(spec)    -> TRANSPORT.send(spec, stream of (name, tensor), sender, senders)
    generator receive_weights(spec) -> TRANSPORT.receive(spec) yields (name, tensor), checked
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import field, frozen

from whet.component import AdapterInfo

if TYPE_CHECKING:
    from whet.data.metrics import Metric
    from whet.data.records import Completion, Request

IN_PLACE = "in-place"
"""The transport whose two ends are one memory."""
STREAMED = ("cuda-ipc", "broadcast")
"""Transports that yield tensors on a GPU, one bucket at a time, because a receiver has no memory for all weights at
once. Senders and receivers find each other through the driver's exchange."""


@frozen
class TransferSpec:
    """One transfer of weights. An incomplete transfer is refused."""

    transport: str
    """`in-place` (same memory), `shared` (same process), `cuda-ipc` (same GPU), `broadcast` (same network),
    `shared-memory` (any nodes of a run), `disk` (same file system)."""
    address: str
    """For `shared-memory` and `disk`, a folder. For `shared`, a key within the process. `in-place` has none. For the
    other transports, `host:port` of the driver's exchange."""
    session: str
    """A new name for each transfer. Sender and receiver check it."""
    version: int
    """Version of the weights: the number of the step that made them. 0: the weights loaded at the start."""
    dtype: str = ""
    """The dtype that the receiver needs, e.g. `float32`. Empty: the sender's dtype."""
    senders: int = 1
    """Number of workers that send. Exactly one of them sends each weight."""
    receivers: int = 1
    """Number of receivers that a sender waits for. `broadcast`: all receivers. `cuda-ipc`: receivers on the sender's
    GPU. `shared`: the number of receivers that take the weights."""
    timeout_seconds: float = 300.0
    drain_seconds: float = 0.0
    """The time that receivers have in addition, to finish running requests before they take the weights."""
    token: str = field(default="", repr=False)
    """A secret in hexadecimal digits that sender and receiver must know. Transports that use the exchange need it."""
    kept: bool = True
    """For `broadcast` and `cuda-ipc`: whether senders keep a copy of the weights for late receivers."""
    adapter: AdapterInfo | None = None
    """The stream holds this adapter alone, by PEFT's names and shapes. None: all weights, with adapters merged."""
    weights: str = "policy"
    """The set of weights that is sent: `policy`, or `trial` for a probe; see `whet.interfaces.backend.Weights`."""


@frozen
class Copy:
    """A copy of a memory on one node."""

    name: str = ""
    """The name of the copy. Receivers on the node open the copy by this name."""
    failure: str = ""
    """The reason why there is no copy. Empty: there is a copy."""


CopyMemory = Callable[[str, int, str, Collection[str], float], Mapping[str, Copy]]
"""(name of the memory, its size, its node, nodes that have a copy already, seconds) -> copies by node."""


class TransportDriver(Protocol):
    """The driver's part of a transport. The workers run the other parts.

    A distribution names the driver's part by an entry point:

        [project.entry-points."whet.transports"]
        disk = "its_package.driver:Files"     # called with (spec, address, copy_memory)

    The address of `spec` is in the scratch folder of the run. `address()` returns the address of the driver's machine.
    """

    spec: TransferSpec
    """The common fields of all transfers of a run. `session` and `version` are not set."""

    def carry(self, spec: TransferSpec) -> None:
        """Bring the weights of one transfer to the place where its receivers read them.

        All senders are done. Receivers may be waiting already.
        """

    def close(self) -> None:
        """Release the resources of the driver's part."""


class Proof(Protocol):
    """A proof that a replica has the weights of a version; see `Probe`."""

    def requests(self, replica: int) -> "list[Request]":
        """Return the requests that the replica must complete."""

    def check(self, replica: int, completions: "Sequence[Completion]") -> float:
        """Return the mean absolute difference of a replica's logprobs from the trainer's, in nats.

        Raise `WeightSyncError` if the replica does not have the weights.
        """


class Probe(Protocol):
    """Checks after weight syncs that each replica of the generator computes with the trainer's weights.

    A distribution names it by an entry point. It is called as in `whet.run.weight_sync.make_probe`:

        [project.entry-points."whet.probes"]
        logprobs = "its_package.probe:Probe"
    """

    overdue: bool
    """Whether a replica came back to weights that were not checked."""
    trial: bool
    """Whether the next weight sync must follow one of `trial` weights, with which it is checked."""

    def due(self, version: int) -> bool:
        """Return whether this weight sync, the next of this run attempt, must be checked."""

    def __call__(self, version: int, weights: str = "policy") -> Proof | None:
        """Check all replicas that are present, while the trainer still holds the weights that it sent.

        Return the proof that restarted replicas must pass, or None if no replica is present. Raises `WeightSyncError`.
        """

    def metrics(self) -> "dict[str, Metric]":
        """Return the metrics of the checks since the last call."""
