"""The contract of a generator: tokens in, tokens and logprobs out."""

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from whet.data.records import Completion, Request
    from whet.interfaces.weights import TransferSpec
    from whet.interfaces.workers import Pending

OnWeightUpdate = Literal["drain", "continue", "abort"]
"""What happens to requests under way when new weights arrive; a generator's facts say which it can."""


@runtime_checkable
class Generator(Protocol):
    """Continues token sequences. What it sees is append-only; nothing is tokenised here.

    The component's target is called as `target(config, site)` on the driver, with a `whet.interfaces.workers.Site`.
    Logprobs are of `log_softmax(logits / temperature)`; at temperature 0 the likeliest token is taken and its
    logprob is that at temperature 1.
    """

    async def generate(self, request: "Request") -> "Completion":
        """Continue one sequence. Requests made in one turn of the event loop travel in one message;
        cancelling the awaiting task aborts the request.
        """
        ...

    def receive_weights(
        self, link: "TransferSpec", version: int, on_weight_update: OnWeightUpdate = "drain"
    ) -> "Pending":
        """Start to take new weights over a link.

        Requests that run are drained: they end with the old weights first; kept: they go on with the new ones, and
        `Completion.versions` says from which token on; or aborted: they end at once with what they have and
        `stop="abort"`, to be asked for the rest. Requests that wait, and all later ones, get the new weights.
        """
        ...

    def sleep(self) -> int | None:
        """Give memory back: that of its device, as far as its facts say; how many bytes of all ranks, None: unknown.

        Requests under way end first; until `wake` others are refused by a `WhetError`. Weights that come meanwhile are
        taken, with the memory that they need and no more; to sleep once more gives that back, too, and does else
        nothing.
        """
        ...

    def wake(self) -> None:
        """Take it again, and serve with the weights that it had, or that came meanwhile. Awake already: nothing."""
        ...

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        ...
