"""The handle on the driver of a backend whose ranks share batches: splits a batch, and joins the results."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
import numpy as np

from whet.component import Spec
from whet.data import metrics
from whet.data.batch import SEQUENCE_COLUMNS, TOKEN_COLUMNS, Batch, Shards
from whet.data.metrics import Metric
from whet.errors import WhetError
from whet.interfaces.axes import ParallelAxes
from whet.interfaces.backend import Weights
from whet.interfaces.weights import IN_PLACE, TransferSpec
from whet.interfaces.workers import Pending, RoleContext, Workers
from whet_training.layout import Layout
from whet_training.schedule import ScheduleConfig, past_end, without_rate
from whet_training.sharing import pair_cost, share

logger = logging.getLogger(__name__)

_ROW = "whet_training_row"


class Scheduled(attrs.AttrsInstance, Protocol):
    """The config of a backend that has a schedule."""

    @property
    def schedule(self) -> ScheduleConfig:
        """The learning rate over optimizer steps."""


class ShardedBackend:
    """Implements `whet.interfaces.backend.Backend`, whose methods the workers have.

    Besides the methods of `Backend`, which take a shard in place of a batch, a worker has `coordinates` and `live`; see
    `whet_ops.loss_worker.LossWorker`. Its `load` returns the optimizer steps of the checkpoint. Its `sleep` is called
    with whether the weights that it sends sleep as well.
    """

    def __init__(self, target: str, config: Scheduled, context: RoleContext, layout: Layout) -> None:
        """Start workers of the class `target`. `layout`: what a batch costs, so that it is shared out evenly."""
        context.status("loading the model to train")
        self._schedule, self._planned = config.schedule, context.optimizer_steps or context.run.steps
        self._steps, self._warned = 0, False
        if context.trained and (words := without_rate(config.schedule, self._planned)):
            logger.warning(words)
        self._workers = context.worker_group.spawn(
            target,
            {
                "config": attrs.asdict(config),
                "model": context.model,
                "total_steps": self._planned,
                "seed": context.seed,
                "trained": context.trained,
                "scratch": str(context.scratch.absolute()),
            },
        )
        self._axes = ParallelAxes.reported_by(self._workers)
        self._state: Literal["awake", "sending", "asleep"] = "awake"
        """`sending`: all memory is freed but that of the weights that are sent."""
        self._takes_turns = False
        """Whether it has ever slept: then others need its memory."""
        self._freed = 0
        """Bytes that the last weight sync freed."""
        self._layout: Layout = layout
        self._pair = pair_cost(context.model)

    @property
    def _awake(self) -> Workers:
        """Return the workers, with all memory. Raises `WhetError` while the backend sleeps."""
        self._refuse_asleep()
        if self._state == "sending":
            self.wake()
        return self._workers

    def _refuse_asleep(self) -> None:
        if self._state == "asleep":
            raise WhetError("the backend sleeps; wake it first")

    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, Metric]:
        """Take one optimizer step. Token counts are taken over `count_over` if it is given, else over the batch."""
        whole = None if count_over is None or count_over is batch else count_over.shard(self._axes.data)
        shards = self._share(batch, self._live(batch, loss))
        found = metrics.merge(self._axes.scatter(self._awake, "train", shards, loss, whole))
        self._steps += not {"skipped_steps", "nonfinite_steps"} & set(found)
        if not self._warned and (words := past_end(self._schedule, self._steps, self._planned)):
            self._warned = True
            logger.warning(words)
        return found

    def evaluate(self, batch: Batch, loss: Spec) -> Mapping[str, Metric]:
        """Return the loss and its metrics, computed without gradient."""
        return metrics.merge(self._axes.scatter(self._awake, "evaluate", self._share(batch), loss))

    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        """Return outputs computed without gradient: NumPy, [N] or [N, K] each, in the order of the batch."""
        shards = self._share(batch.with_columns(**{_ROW: np.arange(batch.sequences)}))
        found = self._axes.scatter(self._awake, "score", shards, outputs, weights)
        columns = {f"output:{name}": np.concatenate([one[name] for one in found]) for name in outputs}
        joined = attrs.evolve(shards.batch, per_token={**shards.batch.per_token, **columns})
        restored = joined.take(np.argsort(joined[_ROW], kind="stable"))
        return {name: restored[f"output:{name}"] for name in outputs}

    def _share(self, batch: Batch, live: Any = None) -> Shards:
        """Return the shard of each data-parallel rank, so that all take equally long."""
        return share(batch, self._axes.data, self._layout, self._pair, live)

    def _live(self, batch: Batch, loss: Spec) -> Any:
        """Return which sequences [B] can change a loss. None: all that have a target, or there is nothing to share out.

        Only the workers can build the loss. What this costs is small against ranks that wait for others.
        """
        if self._axes.data == 1 or set(batch.columns) <= {*TOKEN_COLUMNS, *SEQUENCE_COLUMNS}:
            return None
        shards = batch.with_columns(**{_ROW: np.arange(batch.sequences)}).shard(self._axes.data)
        found = self._axes.scatter(self._awake, "live", shards, loss, phase="train")
        live = np.zeros(batch.sequences, np.bool_)
        live[shards.batch[_ROW]] = np.concatenate(found)
        return live

    def send_weights(self, spec: TransferSpec) -> Pending:
        """Start to send the policy's weights of one transfer. Returns the pending call.

        Where roles take turns, the memory of all but these weights is freed before: the generator wakes beside them.
        """
        self._refuse_asleep()
        if self._takes_turns and self._state == "awake" and spec.transport != IN_PLACE:
            self._freed, self._state = self._free(weights=False), "sending"
        return self._workers.start("send_weights", spec, phase="weight_sync", timeout_seconds=spec.timeout_seconds)

    def save(self, folder: Path) -> Pending:
        """Start to save weights, optimizer and schedule. The returned call is done when the files are durable."""
        return self._awake.start("save", str(folder), phase="save")

    def load(self, folder: Path) -> None:
        """Load a checkpoint that `save` wrote, on any number of ranks."""
        self._steps = self._awake.call("load", str(folder), phase="load")[0]

    def export(self, folder: Path) -> None:
        """Write a model folder that `transformers` can load: weights, config, tokenizer."""
        self._awake.call("export", str(folder), phase="export")

    def sleep(self) -> int:
        """Move weights and optimizer to host memory, or to files on a CPU. Returns the number of bytes freed."""
        given = self._freed + self._free(weights=True)
        self._freed, self._state, self._takes_turns = 0, "asleep", True
        return given

    def _free(self, *, weights: bool) -> int:
        try:
            return sum(self._workers.call("sleep", weights, phase="sleep"))
        except WhetError:  # of several ranks some may sleep
            with suppress(WhetError):
                self.wake()
            raise

    def wake(self) -> None:
        """Bring weights and optimizer back."""
        self._workers.call("wake", phase="wake")
        self._freed, self._state = 0, "awake"

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        self._workers.close()
