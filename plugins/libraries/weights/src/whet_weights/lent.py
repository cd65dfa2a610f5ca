"""The policy's weights of this process, with which a generator of the same process computes in place.

    backend      offer  ->  sent(spec) in each weight sync          holds weights, gradients, optimizer
    generator    borrow ->  taken(spec): the versions agree          computes with the same memory, copies nothing

While the weights are borrowed they keep their memory when the backend sleeps. Imports no torch.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import define, frozen

from whet.errors import WeightSyncError, WhetError
from whet.interfaces.weights import TransferSpec

TRANSFORMERS: Final = "transformers"
"""The form `Tensors`; see `whet.component.WorkerFacts.in_place`."""


@frozen(eq=False)
class Tensors:
    """Weights that are whole tensors, by the names of a model's class in `transformers`."""

    named: Mapping[str, Any]
    """Parameters and buffers: tensors. Tied ones come under each of their names."""
    adapter: Callable[[str], Mapping[str, tuple[Any, Any]] | None] | None = None
    """(set of weights, e.g. `policy`) -> A [r, in] and B [out, r] by the name of the weight, of stacked weights
    [E, r, in] and [E, out, r]. They are not in `named`. None: all weights are trained."""
    scaling: float = 1.0
    """Factor of the product B A."""


@define(eq=False)
class Lent:
    """The policy's weights of this process."""

    form: str
    """See `whet.component.WorkerFacts.in_place`."""
    held: Any
    """The weights in that form, e.g. `Tensors`."""
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


def borrow(form: str) -> Lent:
    """Return the policy's weights of this process. They stay in memory until `borrowed` is set to false again."""
    if _lent is None or _lent.form != form:
        found = "no weights of a backend" if _lent is None else f"weights of a backend in the form {_lent.form}"
        raise WhetError(
            f"generator.weights is shared, and this process holds {found}, wanted the form {form}; put a backend that "
            "offers it and the generator into one group of cluster.colocate with equally many ranks, or set "
            "generator.weights: own"
        )
    if _lent.borrowed:
        raise WhetError("another generator computes with the backend's weights already; set its weights: own")
    _lent.borrowed = True
    _lent.wake()
    return _lent
