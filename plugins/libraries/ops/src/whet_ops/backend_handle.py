"""The handle on the driver of a training backend of one process; its worker is a `BackendWorker`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.component import Spec, import_path
from whet.config.structure import unstructure
from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet.errors import WhetError
from whet.interfaces.backend import Weights
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import Pending, RoleContext, Workers


class WorkerBackend:
    """Implements `whet.interfaces.backend.Backend`, which documents each method. A subclass sets `worker`."""

    worker: str = ""
    """Import path of the subclass of `BackendWorker`."""

    def __init__(self, config: Any, context: RoleContext) -> None:
        context.status("loading the model to train")
        described = {"config": unstructure(config, portable=True), "config_type": import_path(type(config))}
        self._workers = context.worker_group.spawn(self.worker, {**described, "model": context.model})
        self._asleep = False

    @property
    def _awake(self) -> Workers:
        """Return the worker. Raises `WhetError` while the backend sleeps."""
        if self._asleep:
            raise WhetError("the backend sleeps; wake it first")
        return self._workers

    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, Metric]:
        """Take one optimizer step. Where `count_over` is given, its counts normalise the loss."""
        found: dict[str, Metric] = self._call("train", batch, loss, count_over, phase="train")
        return found

    def evaluate(self, batch: Batch, loss: Spec) -> Mapping[str, Metric]:
        """Return the loss and its metrics, computed without gradient."""
        found: dict[str, Metric] = self._call("evaluate", batch, loss, phase="train")
        return found

    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        """Return outputs, computed without gradient: NumPy, [N] float32 each."""
        found: dict[str, Any] = self._call("score", batch, outputs, weights, phase="train")
        return found

    def send_weights(self, spec: TransferSpec) -> Pending:
        """Start to send the policy's weights of one transfer."""
        return self._awake.start("send_weights", spec, phase="weight_sync", timeout_seconds=spec.timeout_seconds)

    def save(self, folder: Path) -> Pending:
        """Start to save weights and optimizer. The call is done when the files are durable."""
        return self._awake.start("save", str(folder), phase="save")

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""
        self._call("load", str(folder), phase="save")

    def export(self, folder: Path) -> None:
        """Write a folder that `transformers` can load."""
        self._call("export", str(folder), phase="save")

    def sleep(self) -> None:
        """Release device memory."""
        self._workers.call("move", "cpu", phase="sleep")
        self._asleep = True

    def wake(self) -> None:
        """Take the memory again."""
        self._workers.call("move", "", phase="wake")
        self._asleep = False

    def close(self) -> None:
        """End the worker. A second call does nothing."""
        self._workers.close()

    def _call(self, method: str, *arguments: Any, phase: str) -> Any:
        return self._awake.call(method, *arguments, phase=phase)[0]
