"""The contract of a training backend: a handle on the driver whose workers hold the model.

Outputs that a model may give; a backend's facts say which it does. Each stands at its token, is of the state *before*
that token, in float32, and 0 where `loss_mask` is false. All are at the batch's `temperature`, where it has one.

    logprobs            [N]     log p(token t | before)
    entropy             [N]     of the distribution over token t, in nats
    topk_ids:K          [N, K]  the K likeliest tokens t, int32; only of `score`
    topk_logprobs:K     [N, K]  their logprobs, of the whole vocabulary; only of `score`
    logprobs_at         [N, K]  logprobs of the tokens in the batch's column `topk_ids` [N, K]
    kl_forward          [N]     KL(teacher || policy) over the whole vocabulary; where the workers hold both
    kl_reverse          [N]     KL(policy || teacher)
    jensen_shannon:B    [N]     B KL(teacher || m) + (1 - B) KL(policy || m), m = B teacher + (1 - B) policy
    values              [N]     of a value head; 0 ... t-1 are the tokens that it has seen. One place more than a
                                sequence has tokens gives the value of all of it: see `whet.rollout.scorer.whole`
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.data.metrics import Metric
    from whet.interfaces.weights import TransferSpec
    from whet.interfaces.workers import Pending

Weights = Literal["policy", "reference", "teacher"]
"""`reference`: what the run started from. `teacher`: a second model that the same workers hold."""


@runtime_checkable
class Backend(Protocol):
    """An algorithm owns optimizer steps; a backend owns everything below one.

    The component's target is called as `target(config, site)` on the driver, with a
    `whet.interfaces.workers.Site`; it spawns its workers through `site.slice`.
    """

    def train(self, batch: "Batch", loss: "Spec", count_over: "Batch | None" = None) -> "Mapping[str, Metric]":
        """Take one optimizer step on the batch (NumPy columns), and give merged metrics.

        Counts are those of `count_over` where given: the loss of a part normalised by the whole. Metrics hold
        at least `loss`, `grad_norm` and `lr`; a count of 0 for every term takes no step.
        """
        ...

    def evaluate(self, batch: "Batch", loss: "Spec") -> "Mapping[str, Metric]":
        """Compute the loss and its metrics without gradient."""
        ...

    def score(self, batch: "Batch", outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        """Compute outputs (NumPy, each [N] or [N, K], 0 where `loss_mask` is false) without gradient."""
        ...

    def send_weights(self, link: "TransferSpec") -> "Pending":
        """Start to send the policy's weights over a link; done when every bucket has been taken."""
        ...

    def save(self, folder: "Path") -> "Pending":
        """Start to save weights, optimizer and schedule; done when durable."""
        ...

    def load(self, folder: "Path") -> None:
        """Load what `save` wrote. Refuses another model's folder with the difference shown."""
        ...

    def export(self, folder: "Path") -> None:
        """Write a folder that `transformers` loads: weights, config, tokenizer, and the chat template of the site's
        model where that is not the folder's own (`whet.data.model_info.write_chat_template`).
        """
        ...

    def sleep(self) -> int | None:
        """Give memory back: that of its device, as far as its facts say; how many bytes of all ranks, None: unknown.

        Called by who owns the turns (`whet.run.colocation`), never by an algorithm. Until `wake` all but `sleep`,
        `wake` and `close` raise `WhetError`. To sleep while it sleeps does nothing.
        """
        ...

    def wake(self) -> None:
        """Take it again, and go on as if it had not slept. Awake already, it does nothing."""
        ...

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        ...
