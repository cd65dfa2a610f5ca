"""The driver's parts of the transports: see `whet.interfaces.weights.TransportDriver`."""

from collections.abc import Callable

import attrs

from whet.interfaces.weights import CopyMemory, TransferSpec
from whet_weights import shared_memory
from whet_weights.carry import carry
from whet_weights.exchange import Exchange


class Files:
    """For transports whose ends meet in a folder, or in one process."""

    def __init__(self, spec: TransferSpec, address: Callable[[], str], copy_memory: CopyMemory) -> None:
        self.spec, self._copy_memory = spec, copy_memory

    def carry(self, spec: TransferSpec) -> None:
        """Carry shared memory to the other nodes of receivers."""
        carry(spec, self._copy_memory)

    def close(self) -> None:
        """Free the memory of workers in this process. The files end with the run's scratch folder."""
        shared_memory.release(self.spec.address)


class Streams:
    """For transports whose ends find each other through an exchange on the driver's machine."""

    def __init__(self, spec: TransferSpec, address: Callable[[], str], copy_memory: CopyMemory) -> None:
        self._exchange = Exchange(address())
        self.spec = attrs.evolve(spec, address=self._exchange.address, token=self._exchange.token)

    def carry(self, spec: TransferSpec) -> None:
        """Do nothing: senders and receivers are connected."""

    def close(self) -> None:
        """Stop listening."""
        self._exchange.close()
