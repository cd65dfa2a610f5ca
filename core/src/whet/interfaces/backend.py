"""The contract of a training backend: a handle on the driver. The backend's workers hold the model.

The table lists the outputs that a model can compute. A backend's facts list the outputs that the backend offers. The
value at token t is computed from the tokens *before* t. It is float32, and 0 where `loss_mask` is false. If the batch
has a `temperature`, all outputs use it.

    logprobs            [N]     log p(token t | before)
    entropy             [N]     of the distribution over token t, in nats
    topk_ids:K          [N, K]  the K likeliest tokens t, int32; `score` only
    topk_logprobs:K     [N, K]  their logprobs, over the whole vocabulary; `score` only
    logprobs_at         [N, K]  logprobs of the tokens in the batch's column `topk_ids` [N, K]
    kl_forward          [N]     KL(teacher || policy) over the whole vocabulary; only if the workers hold both
    kl_reverse          [N]     KL(policy || teacher)
    jensen_shannon:B    [N]     B KL(teacher || m) + (1 - B) KL(policy || m), m = B teacher + (1 - B) policy
    values              [N]     output of a value head after the tokens 0 ... t-1. To get the value of a whole
                                sequence, append one token to the sequence: see `whet.rollout.scorer.whole`
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

Weights = Literal["policy", "reference", "teacher", "base", "trial"]
"""A set of weights. `policy`: the weights in training. `reference`: the weights at the start of the run. `teacher`: a
second model that the same workers hold. Of a backend that trains an adapter, `base`: the model without one. `trial`:
the model with a random adapter that changes its outputs clearly, which proves that a generator applies adapters."""


class PendingSave(Protocol):
    """A save that goes on while the weights change: `taken`, then any other calls of the backend, then `result`."""

    def taken(self) -> object:
        """Wait until the backend has copied all that it saves. From then on every method may be called.

        Raise `WorkerError` if a worker fails, dies or misses its deadline.
        """

    def result(self) -> object:
        """Wait until the files are durable. Any thread may call this, after `taken`.

        Raise `WorkerError` if a worker fails, dies or misses its deadline.
        """


@runtime_checkable
class SavesInBackground(Protocol):
    """What a backend may offer beside `Backend`. A run waits for `save` of a backend that does not offer it."""

    def save_in_background(self, folder: "Path") -> PendingSave:
        """Start to copy weights, optimizer and schedule, and to write the copy: the same files as `save` writes.

        The next save begins after the result of this one. `close` may come before the result, which is an error then.
        """


@runtime_checkable
class Backend(Protocol):
    """A handle on training workers. The algorithm decides on optimizer steps; the backend does the work of each step.

    The component's target is called as `target(config, context)` on the driver. The context is a
    `whet.interfaces.workers.RoleContext`. The target starts its workers with `context.worker_group.spawn`.

    With tensor parallelism, for example, several ranks work on the same data. Then the backend calls its workers
    through `whet.interfaces.axes.ParallelAxes`, which sends a batch shard once for each data-parallel rank.
    """

    def train(self, batch: "Batch", loss: "Spec", count_over: "Batch | None" = None) -> "Mapping[str, Metric]":
        """Take one optimizer step on the batch (NumPy columns), and return the merged metrics.

        If `count_over` is given, the loss is normalised by the counts of `count_over`, not of `batch`: a part of a
        batch is normalised by the counts of the whole batch. The metrics include at least `loss`, `grad_norm` and
        `lr`. If the count of every term of the loss is 0, no step is taken.
        """

    def evaluate(self, batch: "Batch", loss: "Spec") -> "Mapping[str, Metric]":
        """Return the metrics of the loss, including its value, computed without gradient."""

    def score(self, batch: "Batch", outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        """Return model outputs without gradient. Each is a NumPy array [N] or [N, K], 0 where `loss_mask` is false."""

    def send_weights(self, spec: "TransferSpec") -> "Pending":
        """Start to send the weights of one transfer. The call is done when every bucket has been received."""

    def save(self, folder: "Path") -> "Pending":
        """Start to save weights, optimizer and schedule. The call is done when the files are durable.

        The weights do not change before that. See `SavesInBackground` for a save that training does not wait for.
        """

    def load(self, folder: "Path") -> None:
        """Load a folder that `save` wrote. If it belongs to another model, raise an error that shows the difference."""

    def export(self, folder: "Path") -> None:
        """Write a folder that `transformers` can load: weights, config, tokenizer and chat template.

        The chat template is the template of the context's model. If the folder does not have this template already,
        write it with `whet.data.model_info.write_chat_template`.
        """

    def sleep(self) -> int | None:
        """Release device memory, as far as the backend's facts promise. Return the bytes released, summed over ranks.

        None: the number is unknown. Only the scheduler of colocated roles (`whet.run.colocation`) calls this method; an
        algorithm never does. Until `wake`, every method except `sleep`, `wake` and `close` raises `WhetError`. A second
        call does nothing.
        """

    def wake(self) -> None:
        """Allocate the memory again and restore the state from before `sleep`. If the backend is awake, do nothing."""

    def close(self) -> None:
        """End the workers. A second call does nothing."""
