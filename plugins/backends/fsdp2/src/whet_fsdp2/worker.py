"""A rank of the backend: holds its share of the model, and computes losses, gradients and scores.

One call of `train`:

    counts of the loss  -> summed over ranks, before anything else
    live sequences      -> sequences that cannot change the loss are left out of the forward pass
    micro-batches       -> whole units, up to a budget of tokens; every rank runs the same number of micro-batches
        forward         -> logprobs -> loss -> weight x sum / global count -> backward
    gradient norm       -> over all ranks; if it is not finite, no step is taken
    clip, AdamW or Muon
"""

from collections.abc import Iterator, Mapping
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
from whet_fsdp2.experts import Step
from whet_fsdp2.feed import Feed, feed, nothing, spread
from whet_fsdp2.held import HeldModels, leaving_room
from whet_fsdp2.lora import Adapters
from whet_fsdp2.root import AnyRoot
from whet_ops.loss_worker import LossWorker, flag, is_finite, room
from whet_training.heads import outputs_of
from whet_training.layout import ranges, used_lengths
from whet_training.packing import plan
from whet_training.ranks import Watch


class Worker(HeldModels, LossWorker):
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
                **(flag("skipped_steps") if self._first else {}),
            }
        watch = Watch(self._device, self._ranks.role)
        self._weights.drop_gradients()
        with self._memory.phase("train"):
            total, found = self._accumulate(self._live(batch, made), made, counts, watch)
        with self._memory.phase("optimizer"):
            self._weights.complete_gradients()
            self._stepper.drop_frozen()
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
                objective, of_loss = self._objective_of(one, outputs, part, loss, counts)
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
        parts = sum(chosen is not None for chosen in self._plan(batch))
        return self._experts.begin(batch, parts, live, passes())

    def _backward(self, objective: Tensor, outputs: Mapping[str, Tensor]) -> None:
        if not objective.requires_grad:
            if self._ranks.size == 1:
                return
            # The other ranks gather and reduce in their backward pass; this one has to take part.
            objective = outputs[self._root.probe].nan_to_num().sum() * 0.0
        # FSDP2 averages gradients over its ranks; the objective is a sum.
        torch.autograd.backward(objective * self._ranks.grid.averaged)

    def _objective_of(
        self, one: Feed, outputs: Mapping[str, Tensor], part: Batch | None, loss: Loss, counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return the objective of a pass and the loss's metrics. A pass that only keeps step with others adds 0."""
        if part is None:
            return torch.zeros((), device=self._device), {}
        return self._objective(spread(one, outputs), part, loss, counts)

    def _given(self) -> frozenset[str]:
        return outputs_of(self._config.head, self._config.teacher)

    def _drop_gradients(self) -> None:
        self._weights.drop_gradients()

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
            objective, of_loss = self._objective_of(one, self._root(one, made.outputs), part, made, counts)
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
            return self._score(root, batch, outputs, weights)

    def _score(self, root: AnyRoot, batch: Batch, outputs: tuple[str, ...], weights: str) -> dict[str, Any]:
        self._refuse_unknown(outputs, "what is to be scored")
        found = {name: room(name, batch) for name in outputs}
        starts = np.cumsum(batch["lengths"]) - batch["lengths"]
        for chosen in self._plan(batch):
            part = None if chosen is None else batch.take(chosen)
            one = self._feed(part, batch, weights)
            values = spread(one, root(one, outputs))
            if part is None:
                continue
            where = ranges(starts[chosen], part["lengths"])
            for name in outputs:
                found[name][where] = values[name].cpu().numpy()
        return found

    # What both need

    def _plan(self, batch: Batch) -> list[Any]:
        """Return the sequences of each micro-batch. None: only other ranks still have a micro-batch."""
        self._refuse_long(batch)
        parts = plan(batch, self._layout, self._config.micro_batch_tokens) if batch.sequences else []
        return [*parts, *[None] * (self._ranks.max(len(parts)) - len(parts))]

    def _refuse_long(self, batch: Batch) -> None:
        longest = int(used_lengths(batch).max(initial=0))
        if self._longest_alone is not None and longest > self._longest_alone:
            raise WhetError(
                f"model.path: {longest} tokens of a sequence enter the model, whose rotary embeddings (longrope or "
                f"dynamic) follow the longest sequence of a pass beyond {self._longest_alone} tokens, so numbers would "
                f"depend on micro-batches; set rollout.max_context or data.max_length to {self._longest_alone}"
            )

    def _micro_batches(self, batch: Batch) -> Iterator[Batch | None]:
        for chosen in self._plan(batch):
            yield None if chosen is None else batch.take(chosen)

    def _feed(self, part: Batch | None, batch: Batch, weights: str = "policy") -> Feed:
        context = self._ranks.context
        one = (
            nothing(batch.take([]), self._layout, self._device, context)
            if part is None
            else feed(part, self._layout, self._device, context, self._widths)
        )
        if self._experts:
            self._experts.enter(part, one, weights)
        return one
