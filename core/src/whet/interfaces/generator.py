"""The contract of a generator: tokens in, tokens and logprobs out.

If `RoleContext.columns` names columns, a generator records them with each completion. Its facts list those it can:

    routed_experts   [prompt + completion, layers * k] int16   the k experts of each layer with experts that computed
                                                               the token as an input; -1: unknown, as at the last token

A caller that shows tokens while they are sampled sets a listener around its call. It is a context variable, so nothing
that stands between the caller and the generator has to pass it on:

    with listening(Listener(show)):
        completion = await generator.generate(request)

A generator whose facts list `progress` calls the listener with `Progress` records before it returns; others ignore it.
The completion decides: after the loss of a replica, a request is sampled again from its first token on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    from whet.data.records import Completion, Progress, Request
    from whet.interfaces.weights import TransferSpec
    from whet.interfaces.workers import Pending

OnWeightUpdate = Literal["drain", "continue", "abort"]
"""What happens to running requests when new weights arrive. A generator's facts list the values that it supports."""


@frozen
class Listener:
    """Receives the tokens of a request while they are sampled."""

    call: "Callable[[Progress], None]"
    """Called on the event loop of the caller. It must not wait."""
    likeliest: int = 0
    """The number of likeliest tokens wanted at each position; only for generators whose facts list `likeliest`."""


listener: "ContextVar[Listener | None]" = ContextVar("listener", default=None)
"""The listener of the requests that this task makes."""


@contextmanager
def listening(to: "Listener | None") -> Iterator[None]:
    """Set the listener of the requests made in the body."""
    token = listener.set(to)
    try:
        yield
    finally:
        listener.reset(token)


@runtime_checkable
class Replicated(Protocol):
    """A generator of several replicas that are lost and replaced one by one."""

    def present(self) -> tuple[int, int]:
        """Return how many replicas take part in a weight sync now, and how many there are if none is lost."""


@runtime_checkable
class Generator(Protocol):
    """Continues token sequences. The tokens that it sees are append-only, and it tokenises nothing.

    The component's target is called as `target(config, context)` on the driver; the context is a
    `whet.interfaces.workers.RoleContext`.
    Logprobs are of `log_softmax(logits / temperature)`. At temperature 0 the likeliest token is taken, and its logprob
    is the one at temperature 1.
    """

    async def generate(self, request: "Request") -> "Completion":
        """Continue one sequence and return the completion.

        Requests made in the same iteration of the event loop are sent in one message. Cancelling the awaiting task
        aborts the request.
        """

    def receive_weights(
        self, spec: "TransferSpec", version: int, on_weight_update: OnWeightUpdate = "drain"
    ) -> "Pending":
        """Start to receive new weights of one transfer.

        `on_weight_update` decides about running requests. `drain`: they finish with the old weights first. `continue`:
        they use the new weights from their next token on, and `Completion.versions` records the version of each token.
        `abort`: they end at once
        with the tokens that they have and `stop="abort"`; the caller requests the rest. Waiting requests and all later
        ones use the new weights.
        """

    def sleep(self) -> int | None:
        """Release device memory, as far as the generator's facts promise. Return the bytes released, summed over ranks.

        None: the number is unknown. Running requests finish first. Until `wake`, new requests are refused with a
        `WhetError`. Weights that arrive meanwhile are received, and take only the memory that they need. A second call
        of `sleep` releases that memory too, and otherwise does nothing.
        """

    def wake(self) -> None:
        """Take the memory again and serve with the newest weights. Does nothing if the generator is awake.

        The newest weights are those from before `sleep`, or those that arrived since.
        """

    def close(self) -> None:
        """End the workers. Safe to call twice."""
