"""A rank of the backend: holds its share of the model, and computes losses, gradients and scores.

One call of `train`:

    counts of the loss  -> summed over ranks, before anything else
    live sequences      -> sequences that cannot change the loss are left out of the forward pass
    micro-batches       -> whole units, up to a budget of tokens; every rank runs the same number of micro-batches
        forward         -> logprobs -> loss -> weight x sum / global count -> backward
    gradient norm       -> over all ranks; if it is not finite, no step is taken
    clip, AdamW or Muon
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.component import Spec
from whet.data import metrics
from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet.errors import WhetError
from whet.interfaces.loss import Loss
from whet_fsdp2.config import outputs as known_outputs
from whet_fsdp2.experts import Step
from whet_fsdp2.feed import Feed, feed, nothing, spread
from whet_fsdp2.held import HeldModels, leaving_room
from whet_fsdp2.lora import Adapters
from whet_fsdp2.optimizer import is_finite
from whet_fsdp2.packing import plan
from whet_fsdp2.ranks import Watch
from whet_fsdp2.root import AnyRoot

MAX_NONFINITE = 3
"""Calls of `train` in a row that may end without a step because loss or gradient is not finite."""


class Worker(HeldModels):
    """A rank of the backend. The driver calls the public methods by name, on every rank."""

    # Training

    @leaving_room
    def train(self, batch: Batch | None, loss: Spec, count_over: Batch | None = None) -> dict[str, Metric]:
        """Take one optimizer step on this rank's share of a batch."""
        if not self._trained:
            raise WhetError("this model is frozen: nobody said that it would be trained")
        batch, count_over = self._ranks.share([batch, count_over])
        made = self._loss(loss)
        counts = self._counts(made, batch if count_over is None else count_over)
        tokens = {"tokens": metrics.total(float(batch.tokens))}
        if not any(counts.values()):
            return {
                **tokens,
                **self._of_step(0.0, 0.0, self._stepper.next_rate()),
                **(_flag("skipped_steps") if self._first else {}),
            }
        watch = Watch(self._device, self._ranks.role)
        self._weights.drop_gradients()
        with self._memory.phase("train"):
            total, found = self._accumulate(self._live(batch, made), made, counts, watch)
        with self._memory.phase("optimizer"):
            self._weights.complete_gradients()
            (value,) = self._ranks.sum([total])
            norm = self._ranks.sum_all([float(self._weights.square_of_norm())])[0] ** 0.5
        if not is_finite(value, norm):
            return {**tokens, **found, **self._refuse_step(value, norm), **watch.metrics()}
        self._nonfinite = 0
        with self._memory.phase("optimizer"):
            rate = self._stepper.step(norm, self._config.max_grad_norm)
        self._weights.drop_gradients()
        watch.lap("optimizer")
        of_step = {**self._of_step(value, norm, rate), **self._memory.metrics()}
        return {**tokens, **found, **of_step, **(watch.metrics() if self._first else {})}

    def _of_step(self, value: float, norm: float, rate: float) -> dict[str, Metric]:
        """Return the metrics that are equal on all ranks: on rank 0 only, so that they are counted once."""
        if not self._first:
            return {}
        return {"loss": metrics.mean(value), "grad_norm": metrics.mean(norm), "lr": metrics.mean(rate)}

    def _refuse_step(self, value: float, norm: float) -> dict[str, Metric]:
        self._weights.drop_gradients()
        self._nonfinite += 1
        if self._nonfinite >= MAX_NONFINITE:
            raise WhetError(
                f"the loss is {value} and the gradient's norm {norm}: not finite for {self._nonfinite} calls in "
                "a row, so no step was taken; lower backend.optimizer.lr, or look at the loss's inputs"
            )
        return _flag("nonfinite_steps") if self._first else {}

    def _accumulate(
        self, batch: Batch, loss: Loss, counts: Mapping[str, float], watch: "Watch"
    ) -> tuple[float, dict[str, Metric]]:
        """Add up gradients over micro-batches. Returns this rank's part of the objective, and the loss's metrics."""
        values, found = [], []
        routing = self._routing(batch, loss)
        for part in self._micro_batches(batch):
            one = self._feed(part, batch)
            with torch.enable_grad():
                outputs = self._root(one, loss.outputs)
                objective, of_loss = self._objective(one, outputs, part, loss, counts)
                if routing is not None:
                    objective = routing.add_to(objective, outputs[self._root.probe])
                watch.lap("forward")
                self._backward(objective, outputs)
            values.append(objective.detach())
            found.append(of_loss)
            watch.lap("backward")
        total = float(torch.stack(values).double().sum()) if values else 0.0
        if routing is not None:
            found.append(routing.metrics())
        return total, metrics.detached(metrics.merge(found))

    def _routing(self, batch: Batch, loss: Loss) -> Step | None:
        """Begin to count the routing of a step. None: the model is dense."""
        if not self._experts:
            return None

        def passes() -> Iterator[None]:
            for part in self._micro_batches(batch):
                with torch.no_grad():
                    self._root.pass_through(self._feed(part, batch))
                yield

        live = bool(torch.as_tensor(loss.live(self._tensors(batch))).any()) if batch.sequences else False
        return self._experts.begin(batch, len(self._plan(batch)), live, passes())

    def _backward(self, objective: Tensor, outputs: Mapping[str, Tensor]) -> None:
        if not objective.requires_grad:
            if self._ranks.size == 1:
                return
            # The other ranks gather and reduce in their backward pass; this one has to take part.
            objective = outputs[self._root.probe].nan_to_num().sum() * 0.0
        # FSDP2 averages gradients over its ranks; the objective is a sum.
        torch.autograd.backward(objective * self._ranks.grid.averaged)

    def _objective(
        self, one: Feed, outputs: Mapping[str, Tensor], part: Batch | None, loss: Loss, counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return weight x sum / global count of a micro-batch, summed over terms, and the loss's metrics."""
        zero = torch.zeros((), device=self._device)
        if part is None:
            return zero, {}
        result = loss(spread(one, outputs), self._tensors(part))
        for name, value in result.terms.items():
            if counts.get(name):
                zero = zero + value * (loss.weights.get(name, 1.0) / counts[name])
        return zero, dict(result.metrics)

    # Without gradient

    @leaving_room
    @torch.no_grad()
    def evaluate(self, batch: Batch | None, loss: Spec) -> dict[str, Metric]:
        """Return the metrics of the loss on this rank's share; rank 0 adds the loss over all ranks."""
        batch = self._ranks.share(batch)
        made = self._loss(loss)
        counts = self._counts(made, batch)
        total, found = 0.0, []
        for part in self._micro_batches(batch):
            one = self._feed(part, batch)
            objective, of_loss = self._objective(one, self._root(one, made.outputs), part, made, counts)
            total += float(objective)
            found.append(of_loss)
        (value,) = self._ranks.sum([total])
        tokens = {"tokens": metrics.total(float(batch.tokens))}
        if self._first:
            tokens["loss"] = metrics.mean(value)
        return {**tokens, **metrics.detached(metrics.merge(found))}

    @leaving_room
    @torch.no_grad()
    def score(self, batch: Batch | None, outputs: tuple[str, ...], weights: str = "policy") -> dict[str, Any]:
        """Return outputs of this rank's share: NumPy, [N] or [N, K] each."""
        batch = self._ranks.share(batch)
        ours = weights == "policy" or (self._adapters is not None and weights in Adapters.SETS)
        root = self._root if ours else self._frozen.get(weights)
        if root is None:
            raise WhetError(f"no {weights} weights are held; set backend.{weights}")
        with self._using(weights if ours else "policy"):
            return self._score(root, batch, outputs)

    def _score(self, root: AnyRoot, batch: Batch, outputs: tuple[str, ...]) -> dict[str, Any]:
        self._refuse_unknown(outputs, "what is to be scored")
        found = {name: _room(name, batch) for name in outputs}
        starts = np.cumsum(batch["lengths"]) - batch["lengths"]
        for chosen in self._plan(batch):
            part = None if chosen is None else batch.take(chosen)
            one = self._feed(part, batch)
            values = spread(one, root(one, outputs))
            if part is None:
                continue
            lengths = part["lengths"]
            where = np.arange(part.tokens) + np.repeat(starts[chosen] - (np.cumsum(lengths) - lengths), lengths)
            for name in outputs:
                found[name][where] = values[name].cpu().numpy()
        return found

    # What both need

    def _loss(self, spec: Spec) -> Loss:
        key = json.dumps([spec.target, spec.config_type, spec.config], sort_keys=True, default=str)
        if key not in self._losses:
            from whet.config.build import build

            made: Any = build(spec)
            self._refuse_unknown(made.outputs, f"the loss {spec.target}")
            self._losses[key] = made
        return self._losses[key]

    def _refuse_unknown(self, wanted: Iterable[str], who: str) -> None:
        given = known_outputs(self._config)
        if unknown := sorted(name for name in wanted if name.partition(":")[0] not in given):
            words = f"{', '.join(unknown)}, which this model does not give: it gives {', '.join(sorted(given))}"
            raise WhetError(f"{who} needs {words}")

    def _counts(self, loss: Loss, batch: Batch) -> dict[str, float]:
        """Return the count of each term over all ranks."""
        names = list(loss.weights)
        mine = loss.counts(self._tensors(batch)) if batch.sequences else {}
        return dict(zip(names, self._ranks.sum([float(mine.get(name, 0.0)) for name in names]), strict=True))

    def _live(self, batch: Batch, loss: Loss) -> Batch:
        """Return the batch without units that cannot change the loss. One unit stays, so that the metrics exist."""
        if not batch.sequences:
            return batch
        live = self._of_loss(batch, loss)
        if live.all():
            return batch
        units = batch.units()
        kept = [unit for unit in units if live[unit].any()] or units[:1]
        return batch.take(np.concatenate(kept))

    def live(self, batch: Batch | None, loss: Spec) -> Any:
        """Return which sequences [B] of a batch can change the loss. None where the batch is another rank's."""
        return None if batch is None else self._of_loss(batch, self._loss(loss))

    def _of_loss(self, batch: Batch, loss: Loss) -> Any:
        if not batch.sequences:
            return np.zeros(0, np.bool_)
        return np.asarray(torch.as_tensor(loss.live(self._tensors(batch))).cpu()).astype(bool)

    def _plan(self, batch: Batch) -> list[Any]:
        """Return the sequences of each micro-batch. None: only other ranks still have a micro-batch."""
        parts = plan(batch, self._layout, self._config.micro_batch_tokens) if batch.sequences else []
        return [*parts, *[None] * (self._ranks.max(len(parts)) - len(parts))]

    def _micro_batches(self, batch: Batch) -> Iterator[Batch | None]:
        for chosen in self._plan(batch):
            yield None if chosen is None else batch.take(chosen)

    def _feed(self, part: Batch | None, batch: Batch) -> Feed:
        context = self._ranks.context
        one = (
            nothing(batch.take([]), self._layout, self._device, context)
            if part is None
            else feed(part, self._layout, self._device, context)
        )
        if self._experts:
            self._experts.enter(part, one)
        return one

    def _tensors(self, batch: Batch) -> Batch:
        return batch.map(self._tensor)

    def _tensor(self, column: Any) -> Tensor:
        writable = column if column.flags.writeable else column.copy()
        return torch.from_numpy(writable).to(self._device)


def _room(name: str, batch: Batch) -> Any:
    """Make room for an output of a whole batch."""
    kind, _, k = name.partition(":")
    if kind == "logprobs_at":
        return np.zeros(batch["topk_ids"].shape, np.float32)
    shape = (batch.tokens, int(k)) if kind.startswith("topk_") else (batch.tokens,)
    return np.zeros(shape, np.int32 if kind == "topk_ids" else np.float32)


def _flag(name: str) -> dict[str, Metric]:
    return {name: metrics.total(1.0)}
