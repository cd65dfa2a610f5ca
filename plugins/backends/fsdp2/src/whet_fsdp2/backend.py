"""The backend on the driver: splits a batch over the ranks and joins their results."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from whet.component import Spec
from whet.data import metrics
from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet.errors import WhetError
from whet.interfaces.axes import ParallelAxes
from whet.interfaces.backend import Weights
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import Pending, RoleContext, Workers
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.saving import BackgroundSave

_ROW = "whet_fsdp2_row"


class Fsdp2Backend:
    """A Hugging Face model on a group of ranks. Implements `whet.interfaces.backend.Backend`."""

    def __init__(self, config: Fsdp2Config, context: RoleContext) -> None:
        context.status("loading the model to train")
        self._workers = context.worker_group.spawn(
            "whet_fsdp2.worker:Worker",
            {
                "config": attrs.asdict(config),
                "model": context.model,
                "total_steps": context.run.steps,
                "longest": context.max_context or context.model.max_positions,
                "seed": context.seed,
                "trained": context.trained,
                "scratch": str(context.scratch.absolute()),
            },
        )
        self._axes = ParallelAxes.reported_by(self._workers)
        self._asleep = False

    @property
    def _awake(self) -> Workers:
        """The workers. Raises `WhetError` while the backend sleeps."""
        if self._asleep:
            raise WhetError("the backend sleeps; wake it first")
        return self._workers

    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, Metric]:
        """Take one optimizer step. Token counts are taken over `count_over` if it is given, else over the batch."""
        ranks = self._axes.data
        whole = None if count_over is None or count_over is batch else count_over.shard(ranks)
        return metrics.merge(self._axes.scatter(self._awake, "train", batch.shard(ranks), loss, whole))

    def evaluate(self, batch: Batch, loss: Spec) -> Mapping[str, Metric]:
        """Return the loss and its metrics, computed without gradient."""
        return metrics.merge(self._axes.scatter(self._awake, "evaluate", batch.shard(self._axes.data), loss))

    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        """Return outputs computed without gradient: NumPy, [N] or [N, K] each, in the order of the batch."""
        shards = batch.with_columns(**{_ROW: np.arange(batch.sequences)}).shard(self._axes.data)
        found = self._axes.scatter(self._awake, "score", shards, outputs, weights)
        columns = {f"output:{name}": np.concatenate([one[name] for one in found]) for name in outputs}
        joined = attrs.evolve(shards.batch, per_token={**shards.batch.per_token, **columns})
        restored = joined.take(np.argsort(joined[_ROW], kind="stable"))
        return {name: restored[f"output:{name}"] for name in outputs}

    def send_weights(self, spec: TransferSpec) -> Pending:
        """Start to send the policy's weights of one transfer. Returns the pending call."""
        return self._awake.start("send_weights", spec, phase="weight_sync", timeout_seconds=spec.timeout_seconds)

    def save(self, folder: Path) -> Pending:
        """Start to save weights, optimizer and schedule. The returned call is done when the files are durable."""
        return self._awake.start("save", str(folder), phase="save")

    def save_in_background(self, folder: Path) -> BackgroundSave:
        """Start to copy weights, optimizer and schedule, and to write the copy."""
        return BackgroundSave(self._awake, folder)

    def load(self, folder: Path) -> None:
        """Load a checkpoint that `save` wrote, on any number of ranks."""
        self._awake.call("load", str(folder), phase="load")

    def export(self, folder: Path) -> None:
        """Write a model folder that `transformers` can load: weights, config, tokenizer."""
        self._awake.call("export", str(folder), phase="export")

    def sleep(self) -> int:
        """Move weights and optimizer to host memory, or to files on a CPU. Returns the number of bytes freed."""
        try:
            given: int = sum(self._workers.call("sleep", phase="sleep"))
        except WhetError:  # of several ranks some may sleep
            with suppress(WhetError):
                self._workers.call("wake", phase="wake")
            raise
        self._asleep = True
        return given

    def wake(self) -> None:
        """Bring weights and optimizer back."""
        self._workers.call("wake", phase="wake")
        self._asleep = False

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        self._workers.close()
