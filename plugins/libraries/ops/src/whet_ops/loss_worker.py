"""The work of a rank on a loss, for every way in which ranks share the model.

counts      of each term, summed over ranks before the first forward pass
live        sequences that can change the loss; the others are left out of the forward pass
objective   sum over terms of weight x sum / global count, of one micro-batch
"""

import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.component import Spec
from whet.data import metrics
from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet.errors import WhetError
from whet.interfaces.loss import Loss, LossResult
from whet_ops.wrapped_loss import name_of

logger = logging.getLogger(__name__)

_COUNTS = "`counts` of the loss returns what each term's sum is divided by, e.g. the trained tokens of the batch"
MAX_NONFINITE = 3
"""Calls of `train` in a row that may end without a step because loss or gradient is not finite."""


class LossWorker:
    """A part of a worker. Subclasses set the attributes that are declared here, and override what raises."""

    _ranks: Any
    """A `RankGroup`, or an instance of a subclass."""
    _device: torch.device
    _losses: dict[str, Loss]
    """The losses that were built, by their specs."""
    _nonfinite: int = 0
    """Calls of `train` in a row that took no step."""
    _counted_nothing: bool = False
    """Whether a loss that counted nothing was warned of."""

    @property
    def _first(self) -> bool:
        """Return whether this rank reports what is equal on all ranks."""
        raise NotImplementedError

    def _given(self) -> frozenset[str]:
        """Return the names of the outputs that the model gives."""
        raise NotImplementedError

    def _drop_gradients(self) -> None:
        """Free or zero the gradients."""
        raise NotImplementedError

    def _loss(self, spec: Spec) -> Loss:
        key = json.dumps([spec.target, spec.config_type, spec.config], sort_keys=True, default=str)
        if key not in self._losses:
            from whet.config.build import build

            made: Any = build(spec)
            self._refuse_unknown(made.outputs, f"the loss {name_of(made)}")
            self._losses[key] = made
        return self._losses[key]

    def _refuse_unknown(self, wanted: Iterable[str], who: str) -> None:
        given = self._given()
        if unknown := sorted(name for name in wanted if name.partition(":")[0] not in given):
            words = f"{', '.join(unknown)}, which this model does not give: it gives {', '.join(sorted(given))}"
            raise WhetError(f"{who} needs {words}")

    def _counts(self, loss: Loss, batch: Batch) -> dict[str, float]:
        """Return the count of each term over all ranks."""
        names = list(loss.weights)
        mine: Any = loss.counts(self._tensors(batch)) if batch.sequences else dict.fromkeys(names, 0.0)
        who = f"the loss {name_of(loss)}"
        if not isinstance(mine, Mapping):
            raise WhetError(f"`counts` of {who} returned {mine!r:.60}, wanted a mapping of terms to numbers")
        if set(names) != set(mine):
            raise WhetError(f"{who} has counts of {_listed(mine)}, and weights of {_listed(names)}")
        if odd := {name: value for name, value in mine.items() if not _is_count(value)}:
            name, value = odd.popitem()
            raise WhetError(
                f"the count of {name} of {who} is {value!r:.60}, wanted a number that is not below 0: {_COUNTS}"
            )
        counts = self._ranks.sum([float(mine[name]) for name in names])
        if not any(counts) and not self._counted_nothing:
            self._warn_of_nothing(loss, batch)
        return dict(zip(names, counts, strict=True))

    def _warn_of_nothing(self, loss: Loss, batch: Batch) -> None:
        """Warn if a loss counts nothing of a batch with tokens to train on, in sequences that can change the loss."""
        live = np.repeat(self._of_loss(batch, loss), batch["lengths"]) if batch.sequences else False
        (trained,) = self._ranks.sum([float((batch["loss_mask"] & live).sum())])
        if trained:
            self._counted_nothing = True
            logger.warning(
                f"the loss {name_of(loss)} counts 0 in a batch with {trained:,.0f} tokens to train on, so it "
                f"trains nothing: {_COUNTS}. This is told once"
            )

    def _live(self, batch: Batch, loss: Loss) -> Batch:
        """Return the batch without units that cannot change the loss. It is empty on a rank that has no other units.

        If no rank has other units, one unit stays on each, so that the metrics exist.
        """
        live = self._of_loss(batch, loss)
        (somewhere,) = self._ranks.sum([float(live.any())])
        if live.all():
            return batch
        units = batch.units()
        kept = [unit for unit in units if live[unit].any()] or ([] if somewhere else units[:1])
        return batch.take(np.concatenate(kept) if kept else np.zeros(0, np.int64))

    def live(self, batch: Batch | None, loss: Spec) -> Any:
        """Return which sequences [B] of a batch can change the loss. None where the batch is another rank's."""
        return None if batch is None else self._of_loss(batch, self._loss(loss))

    def _of_loss(self, batch: Batch, loss: Loss) -> Any:
        if not batch.sequences:
            return np.zeros(0, np.bool_)
        live = np.asarray(torch.as_tensor(loss.live(self._tensors(batch))).cpu()).astype(bool)
        if live.shape != (batch.sequences,):
            shape = f"`live` of the loss {name_of(loss)} has the shape {live.shape}"
            raise WhetError(f"{shape}, wanted one truth value for each of {batch.sequences} sequences")
        return live

    def _objective(
        self, outputs: Mapping[str, Tensor], part: Batch, loss: Loss, counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return weight x sum / global count of a micro-batch, summed over terms, and the loss's metrics.

        outputs: [N] or [N, K] each, in the order of the micro-batch.
        """
        total = torch.zeros((), device=self._device)
        result = loss(outputs, self._tensors(part))
        _refuse_result(loss, result, outputs)
        for name, value in result.terms.items():
            if counts[name]:
                total = total + value * (loss.weights[name] / counts[name])
            elif value.detach().abs() > 0:
                words = f"the term {name} of the loss {name_of(loss)} is {float(value.detach()):g}"
                raise WhetError(f"{words} and its count is 0, so it would train nothing: {_COUNTS}")
        return total, dict(result.metrics)

    def _of_step(self, value: float, norm: float, rate: float) -> dict[str, Metric]:
        """Return the metrics that are equal on all ranks: on rank 0 only, so that they are counted once."""
        if not self._first:
            return {}
        return {"loss": metrics.mean(value), "grad_norm": metrics.mean(norm), "lr": metrics.mean(rate)}

    def _refuse_step(self, value: float, norm: float) -> dict[str, Metric]:
        self._drop_gradients()
        self._nonfinite += 1
        if self._nonfinite >= MAX_NONFINITE:
            raise WhetError(
                f"the loss is {value} and the gradient's norm {norm}: not finite for {self._nonfinite} calls in "
                "a row, so no step was taken; lower backend.optimizer.lr, or look at the loss's inputs"
            )
        return flag("nonfinite_steps") if self._first else {}

    def _tensors(self, batch: Batch) -> Batch:
        return batch.map(self._tensor)

    def _tensor(self, column: Any) -> Tensor:
        writable = column if column.flags.writeable else column.copy()
        return torch.from_numpy(writable).to(self._device)


def _refuse_result(loss: Loss, result: Any, outputs: Mapping[str, Tensor]) -> None:
    """Raise `WhetError` if a loss returned what would be left out, or would train nothing, without a word."""
    who = f"the loss {name_of(loss)}"
    if not isinstance(result, LossResult):
        raise WhetError(f"{who} returned {type(result).__name__}, wanted a LossResult")
    if result.terms.keys() - loss.weights.keys():
        raise WhetError(f"{who} returned the terms {_listed(result.terms)}, and has weights of {_listed(loss.weights)}")
    given: Mapping[str, Any] = result.metrics
    for name, metric in given.items():
        if not isinstance(metric, Metric):
            wanted = "wanted a pair (sum, count), or a Metric, so that micro-batches and ranks can be merged"
            raise WhetError(f"the metric {name!r} of {who} is {type(metric).__name__}, {wanted}")
    learns = torch.is_grad_enabled() and all(output.requires_grad for output in outputs.values())
    for name, value in result.terms.items():
        if not isinstance(value, Tensor) or value.ndim:
            found = f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
            raise WhetError(f"the term {name} of {who} is {found}, wanted a tensor of one number: the sum")
        if learns and not value.requires_grad and value != 0:
            raise WhetError(f"the term {name} of {who} has no gradient, so it trains nothing: is it detached?")


def _is_count(value: Any) -> bool:
    try:
        return 0 <= float(value) < math.inf
    except (TypeError, ValueError):
        return False


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def room(name: str, batch: Batch) -> Any:
    """Make room for an output of a whole batch."""
    kind, _, k = name.partition(":")
    if kind == "logprobs_at":
        return np.zeros(batch["topk_ids"].shape, np.float32)
    shape = (batch.tokens, int(k)) if kind.startswith("topk_") else (batch.tokens,)
    return np.zeros(shape, np.int32 if kind == "topk_ids" else np.float32)


def flag(name: str) -> dict[str, Metric]:
    """Return a metric that counts how often something happened."""
    return {name: metrics.total(1.0)}


def is_finite(*numbers: float) -> bool:
    """Return whether all numbers are finite."""
    return all(math.isfinite(number) for number in numbers)
