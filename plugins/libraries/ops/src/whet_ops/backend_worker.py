"""The worker of a training backend of one process, around any model of torch.

    class Worker(BackendWorker):
        def start(self): ...                       # load model and optimizer; set `lr`
        def outputs(self, batch, names): ...       # model outputs [N] or [N, K] with gradient
        def clip(self): ...                        # limit the gradients, return their norm
        def step(self): ...                        # take a step, and forget the gradients
        def send_weights(self, spec): ...          # send all weights
        def write(self, folder): ...               # save weights and optimizer
        def read(self, folder): ...                # load them
        def write_model(self, folder): ...         # weights, config and tokenizer for `transformers`
        def move(self, device): ...                # release memory and take it again

The objective is the sum over terms of weight x sum / count. Counts are known before the first forward pass, so value
and gradient do not depend on how a batch is cut into micro-batches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.component import Spec, resolve
from whet.config.build import build
from whet.config.structure import structure
from whet.data import metrics
from whet.data.batch import Batch
from whet.data.files import fsync
from whet.data.metrics import Metric
from whet.data.model_info import ModelInfo, write_chat_template
from whet.errors import CheckpointError, WhetError
from whet.interfaces.loss import Loss
from whet.interfaces.workers import WorkerRank
from whet_ops.loss_worker import LossWorker, is_finite


class _OneRank:
    """The only rank."""

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers."""
        return list(numbers)


class BackendWorker(LossWorker):
    """Cuts batches into micro-batches, and sums losses, gradients and metrics over them."""

    _ranks = _OneRank()
    _first = True

    lr: float = 0.0
    """The learning rate of the next step."""
    micro_batch_tokens: int = 8192
    """Largest number of tokens in one forward and backward pass. A longer unit gets a pass of its own."""

    def __init__(self, rank: WorkerRank, config: Mapping[str, Any], config_type: str, model: ModelInfo) -> None:
        torch.set_num_threads(rank.threads)
        self.rank, self.info, self.device = rank, model, torch.device(rank.device)
        self._device = self.device
        self.config: Any = structure(dict(config), resolve(config_type), None)
        self.start()

    # What a subclass writes

    def start(self) -> None:
        """Load the model of the folder `self.info.path` on `self.device`, and make an optimizer."""
        raise NotImplementedError("override `start` to load the model")

    def outputs(self, batch: Batch, names: Iterable[str]) -> dict[str, Any]:
        """Return model outputs [N] or [N, K] of a batch of tensors. Position t is about token t; the first one is 0.

        Values where `loss_mask` is false do not matter. Raise an error for a name that the backend cannot compute.
        """
        raise NotImplementedError("override `outputs` to compute them")

    def clip(self) -> float:
        """Limit the gradients, and return the norm that they had."""
        raise NotImplementedError("override `clip` to limit the gradients")

    def step(self) -> None:
        """Take an optimizer step, and forget the gradients."""
        raise NotImplementedError("override `step` to change the weights")

    def send_weights(self, spec: Any) -> None:
        """Send all weights of one transfer, in the dtype of the spec if it names one."""
        raise NotImplementedError("override `send_weights`, e.g. with `whet_weights.transfer.send`")

    def write(self, folder: Path) -> None:
        """Write weights and optimizer into a folder that exists."""
        raise NotImplementedError("override `write` to save checkpoints")

    def read(self, folder: Path) -> None:
        """Load what `write` wrote. If it belongs to another model, raise an error before anything is changed."""
        raise NotImplementedError("override `read` to load checkpoints")

    def write_model(self, folder: str) -> None:
        """Write weights, config and tokenizer for `transformers`. The chat template is written afterwards."""
        raise NotImplementedError("override `write_model` to export the model")

    def move(self, device: str) -> None:
        """Move weights and optimizer to a device. Empty: `self.device`."""

    # What the driver calls

    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> dict[str, Metric]:
        """Take one optimizer step, and return metrics. If all counts are 0, take none."""
        made = build(loss)
        counts = self._counts(made, batch if count_over is None else count_over)
        if not any(counts.values()):
            return self._of_step(0.0, 0.0, self.lr)
        value, found = self._accumulate(batch, made, counts)
        norm = self.clip()
        if not is_finite(value, norm):
            raise WhetError(f"the loss is {value} and the norm of the gradient {norm}; lower the learning rate")
        of_step = self._of_step(value, norm, self.lr)
        self.step()
        return {**found, **of_step}

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: Spec) -> dict[str, Metric]:
        """Return the loss and its metrics."""
        made = build(loss)
        value, found = self._accumulate(batch, made, self._counts(made, batch))
        return {**found, "loss": metrics.mean(value)}

    @torch.no_grad()
    def score(self, batch: Batch, outputs: tuple[str, ...], weights: str) -> dict[str, Any]:
        """Return outputs: NumPy, [N] or [N, K] each."""
        if weights != "policy":
            raise WhetError(f"this backend holds no {weights} weights")
        alone = ([i] for i in range(batch.sequences))  # in their order, whatever the units
        parts = [self._tensors(part) for part in self._micro_batches(batch, alone)]
        found = [self._masked(part, outputs) for part in parts]
        return {name: torch.cat([part[name] for part in found]).cpu().numpy() for name in outputs}

    def save(self, folder: str) -> None:
        """Write weights and optimizer durably."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.write(Path(folder))
        for path in Path(folder).iterdir():
            fsync(path)

    def load(self, folder: str) -> None:
        """Load what `save` wrote."""
        try:
            self.read(Path(folder))
        except Exception as error:  # of the author's reader
            raise CheckpointError(f"the checkpoint {folder} cannot be loaded: {error}") from error

    def export(self, folder: str) -> None:
        """Write a folder that `transformers` can load."""
        self.write_model(folder)
        write_chat_template(self.info, folder)

    def _accumulate(self, batch: Batch, loss: Loss, counts: Mapping[str, float]) -> tuple[float, dict[str, Metric]]:
        """Sum over micro-batches the objective, its gradients if they are enabled, and the loss's metrics."""
        total, found = 0.0, []
        for part in self._micro_batches(batch, batch.units()):
            outputs = self._masked(self._tensors(part), loss.outputs)
            value, of_loss = self._objective(outputs, part, loss, counts)
            if value.requires_grad:
                torch.autograd.backward(value)
            total += float(value.detach())
            found.append(metrics.detached(of_loss))
        return total, metrics.merge(found)

    def _masked(self, batch: Batch, names: Iterable[str]) -> dict[str, Any]:
        mask, found = batch["loss_mask"], self.outputs(batch, names)
        return {
            name: torch.where(mask.view(-1, *[1] * (values.ndim - 1)), values, values.new_zeros(()))
            for name, values in found.items()
        }

    def _micro_batches(self, batch: Batch, units: Iterable[Any]) -> Iterator[Batch]:
        """Cut a batch between units, so that each part has at most `micro_batch_tokens` tokens if it can."""
        chosen: list[int] = []
        tokens = 0
        for unit in units:
            size = int(batch["lengths"][unit].sum())
            if chosen and tokens + size > self.micro_batch_tokens:
                yield batch.take(chosen)
                chosen, tokens = [], 0
            chosen.extend(unit)
            tokens += size
        if chosen:
            yield batch.take(chosen)

    def _tensors(self, batch: Batch) -> Batch:
        return batch.map(lambda column: torch.from_numpy(np.array(column)).to(self.device))
