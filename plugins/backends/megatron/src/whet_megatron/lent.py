"""The policy's weights of this process, with which a generator of the same process computes in place.

    backend      offer  ->  sent(spec) in each weight sync          holds weights, gradients, optimizer
    generator    borrow ->  taken(spec): the versions agree          computes with the same modules, copies nothing

While the weights are borrowed they keep their memory when the backend sleeps. Imports no torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from attrs import define

from whet.errors import WeightSyncError, WhetError
from whet.interfaces.weights import TransferSpec

if TYPE_CHECKING:
    from whet_megatron.groups import Ranks
    from whet_megatron.model import HeldModel

TRANSPORT: Final = "in-place"
"""The transport whose two ends are one memory."""


@define(eq=False)
class Lent:
    """The policy's weights of this process."""

    model: "HeldModel"
    ranks: "Ranks"
    wake: Callable[[], None]
    """Bring the weights back into memory, if the backend has released them."""
    borrowed: bool = False
    weights: str = "policy"
    """The set of weights that was handed over last: `policy`, or `trial` for a probe of an adapter."""
    _session: str = ""
    _version: int = 0

    def sent(self, spec: TransferSpec) -> None:
        """Remember the weight sync in which the backend handed over its weights as they are."""
        if not self.borrowed:
            raise WeightSyncError(f"weight sync {spec.session}: no generator computes with this process's weights")
        self._session, self._version, self.weights = spec.session, spec.version, spec.weights

    def taken(self, spec: TransferSpec) -> None:
        """Raise `WeightSyncError` unless the backend handed over its weights in this weight sync."""
        if (self._session, self._version) != (spec.session, spec.version):
            found = f"session {self._session} of version {self._version}" if self._session else "no session"
            raise WeightSyncError(
                f"weight sync {spec.session} of version {spec.version}: the backend of this process sent {found}"
            )


_lent: Lent | None = None


def offer(lent: Lent) -> None:
    """Offer the policy's weights to a generator of this process."""
    global _lent
    _lent = lent


def withdraw(lent: Lent) -> None:
    """Offer these weights no longer."""
    global _lent
    if _lent is lent:
        _lent = None


def borrow() -> Lent:
    """Return the policy's weights of this process. They stay in memory until `borrowed` is set to false again."""
    if _lent is None:
        raise WhetError(
            "generator.weights is shared, and this process holds no weights of a backend `megatron` that generates "
            "text; put backend and generator into one group of cluster.colocate with equally many ranks, or set "
            "generator.weights: own"
        )
    if _lent.borrowed:
        raise WhetError("another generator computes with the backend's weights already; set its weights: own")
    _lent.borrowed = True
    _lent.wake()
    return _lent
