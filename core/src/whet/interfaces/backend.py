"""The contract of a training backend: a handle on the driver whose workers hold the model.

Outputs that a model may compute; a backend's facts list the outputs that it offers. The value at a token is about the
state *before* that token, in float32, and 0 where `loss_mask` is false. All outputs use the batch's `temperature`,
where the batch has one.

    logprobs            [N]     log p(token t | before)
    entropy             [N]     of the distribution over token t, in nats
    topk_ids:K          [N, K]  the K likeliest tokens t, int32; `score` only
    topk_logprobs:K     [N, K]  their logprobs, over the whole vocabulary; `score` only
    logprobs_at         [N, K]  logprobs of the tokens in the batch's column `topk_ids` [N, K]
    kl_forward          [N]     KL(teacher || policy) over the whole vocabulary; where the workers hold both
    kl_reverse          [N]     KL(policy || teacher)
    jensen_shannon:B    [N]     B KL(teacher || m) + (1 - B) KL(policy || m), m = B teacher + (1 - B) policy
    values              [N]     output of a value head that has seen the tokens 0 ... t-1. To get the value of a whole
                                sequence, append one token to it: see `whet.rollout.scorer.whole`
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
"""`reference`: the weights that the run started from. `teacher`: a second model that the same workers hold."""


@runtime_checkable
class Backend(Protocol):
    """A handle on training workers. An algorithm owns optimizer steps; a backend owns everything below a step.

    The component's target is called as `target(config, context)` on the driver; the context is a
    `whet.interfaces.workers.RoleContext`. The target starts its workers with `context.slice.spawn`. If several ranks
    work on the same data, as with tensor parallelism, it calls them through `whet.interfaces.axes.ParallelAxes`, so
    that a batch shard is sent once for each data-parallel rank.
    """

    def train(self, batch: "Batch", loss: "Spec", count_over: "Batch | None" = None) -> "Mapping[str, Metric]":
        """Take one optimizer step on the batch (NumPy columns), and return the merged metrics.

        Where `count_over` is given, its counts normalise the loss: that is how a part of a batch is normalised by the
        whole. Metrics hold at least `loss`, `grad_norm` and `lr`. Where every term's count is 0, no step is taken.
        """
        ...

    def evaluate(self, batch: "Batch", loss: "Spec") -> "Mapping[str, Metric]":
        """Return the metrics of the loss, its value included, computed without gradient."""
        ...

    def score(self, batch: "Batch", outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        """Return outputs, computed without gradient: NumPy, each [N] or [N, K], 0 where `loss_mask` is false."""
        ...

    def send_weights(self, spec: "TransferSpec") -> "Pending":
        """Start to send the policy's weights of one transfer. The call is done when every bucket has been received."""
        ...

    def save(self, folder: "Path") -> "Pending":
        """Start to save weights, optimizer and schedule. The call is done when the files are durable."""
        ...

    def load(self, folder: "Path") -> None:
        """Load what `save` wrote. Raise an error that shows the difference if the folder belongs to another model."""
        ...

    def export(self, folder: "Path") -> None:
        """Write a folder that `transformers` loads: weights, config, tokenizer and chat template.

        The chat template is that of the context's model, written where the folder does not already have it
        (`whet.data.model_info.write_chat_template`).
        """
        ...

    def sleep(self) -> int | None:
        """Release device memory, as far as the backend's facts promise. Return the bytes released, summed over ranks.

        None: the number is unknown. The code that schedules colocated roles calls this (`whet.run.colocation`), never
        an algorithm. Until `wake`, every method except `sleep`, `wake` and `close` raises `WhetError`. A second call
        does nothing.
        """
        ...

    def wake(self) -> None:
        """Take the memory again and continue in the same state as before `sleep`. Does nothing if the backend
        is awake.
        """
        ...

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        ...
