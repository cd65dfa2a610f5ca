"""A rank of the backend: holds its share of the model, and computes losses, gradients and scores.

One call of `train`:

    counts of the loss  -> summed over ranks, before anything else
    live sequences      -> sequences that cannot change the loss are left out of the forward pass
    micro-batches       -> whole units, up to a budget of tokens; every rank runs equally many passes
        Megatron's schedule: forward and backward passes over the stages; the last stage computes outputs and loss,
        weight x sum / global count
    gradients           -> added up over all ranks that hold the same weights, never averaged
    gradient norm       -> over all ranks; if it is not finite, no step is taken
    clip, AdamW
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from whet.component import Spec
from whet.data import metrics
from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet.errors import WhetError
from whet.interfaces.loss import Loss
from whet_megatron.cpu_shim import as_on_gpu
from whet_megatron.feed import Feed
from whet_megatron.held import HeldModels
from whet_megatron.passes import Passes, Teacher
from whet_ops.head_outputs import wanted_divergences
from whet_ops.loss_worker import LossWorker, flag, is_finite, room
from whet_training.experts import COLUMN
from whet_training.heads import outputs_of
from whet_training.layout import ranges
from whet_training.packing import plan
from whet_training.ranks import clock


class Worker(HeldModels, LossWorker):
    """A rank of the backend. The driver calls the public methods by name, on every rank."""

    @as_on_gpu
    def train(self, batch: Batch | None, loss: Spec, count_over: Batch | None = None) -> dict[str, Metric]:
        """Take one optimizer step on this rank's share of a batch."""
        stepper = self._steps()
        batch, count_over = self._ranks.share([batch, count_over])
        made = self._loss(loss)
        counts = self._counts(made, batch if count_over is None else count_over)
        tokens = {"tokens": metrics.total(float(batch.tokens))}
        if not any(counts.values()):
            skipped = flag("skipped_steps") if self._first else {}
            return {**tokens, **self._of_step(0.0, 0.0, stepper.next_rate()), **skipped}
        begun = clock(self._device)
        stepper.drop_gradients()
        passes = self._passes(self._model)
        with self._memory.phase("train"):
            value, found = self._accumulate(passes, self._live(batch, made), made, counts, backward=True)
        passed = clock(self._device)
        with self._memory.phase("optimizer"):
            norm = stepper.norm()
            seconds = self._seconds(passes, begun, passed)
            if not is_finite(value, norm):
                return {**tokens, **found, **self._refuse_step(value, norm), **seconds}
            self._nonfinite = 0
            rate = stepper.step(norm)
        seconds = self._seconds(passes, begun, passed)
        return {**tokens, **found, **self._of_step(value, norm, rate), **self._memory.metrics(), **seconds}

    def _seconds(self, passes: Passes, begun: float, passed: float) -> dict[str, Metric]:
        """Return the seconds of each phase. Those of the backward pass include waiting for other stages."""
        if not self._first:
            return {}
        forward, role = passes.forward.seconds(), self._ranks.role
        laps = {"forward": forward, "backward": passed - begun - forward, "optimizer": clock(self._device) - passed}
        return {f"seconds/{role}.{phase}": metrics.total(seconds) for phase, seconds in laps.items()}

    def _accumulate(
        self, passes: Passes, batch: Batch, loss: Loss, counts: Mapping[str, float], *, backward: bool
    ) -> tuple[float, dict[str, Metric]]:
        """Run the passes of a batch. Returns the objective over all ranks, and the loss's metrics."""
        parts = [None if chosen is None else batch.take(chosen) for chosen in self._plan(batch)]
        values: list[Tensor] = []
        found: list[dict[str, Metric]] = []

        def finish(number: int, outputs: dict[str, Tensor]) -> Tensor | None:
            if (part := parts[number]) is None:
                return None
            objective, of_loss = self._objective(outputs, part, loss, counts)
            values.append(objective.detach())
            found.append(of_loss)
            return objective

        feeds = [self._feed(part, batch) for part in parts]
        experts = self._model.experts if backward else None
        if experts is not None:
            count, live = sum(part is not None for part in parts), bool(self._of_loss(batch, loss).any())
            experts.begin(batch, count, live, lambda: passes.pass_through(feeds))
        passes.run(feeds, loss.outputs, finish, backward=backward, teachers=self._taught(feeds, loss.outputs))
        (total,) = self._ranks.sum_reported([float(torch.stack(values).double().sum()) if values else 0.0])
        if experts is not None:
            weighted, of_experts = experts.end(self._first)
            total += weighted
            found.append(of_experts)
        return total, metrics.detached(metrics.merge(found))

    @as_on_gpu
    def evaluate(self, batch: Batch | None, loss: Spec) -> dict[str, Metric]:
        """Return the metrics of the loss on this rank's share; one rank adds the loss over all ranks."""
        batch = self._ranks.share(batch)
        made = self._loss(loss)
        counts = self._counts(made, batch)
        value, found = self._accumulate(self._passes(self._model), batch, made, counts, backward=False)
        tokens = {"tokens": metrics.total(float(batch.tokens))}
        if self._first:
            tokens["loss"] = metrics.mean(value)
        return {**tokens, **found}

    @as_on_gpu
    def score(self, batch: Batch | None, outputs: tuple[str, ...], weights: str = "policy") -> dict[str, Any]:
        """Return outputs of this rank's share: NumPy, [N] or [N, K] each. Ranks of other stages return zeros."""
        batch = self._ranks.share(batch)
        ours = weights == "policy" or (self._model.adapters is not None and weights in self._model.adapters.SETS)
        model = self._model if ours else self._frozen.get(weights)
        if model is None:
            raise WhetError(f"no {weights} weights are held; set backend.{weights}")
        self._refuse_unknown(outputs, "what is to be scored")
        if weights != "policy":  # the sampler chose its experts with the policy
            batch = evolve(batch, per_token={name: one for name, one in batch.per_token.items() if name != COLUMN})
        found = {name: room(name, batch) for name in outputs}
        starts = np.cumsum(batch["lengths"]) - batch["lengths"]
        planned = self._plan(batch)
        parts = [None if chosen is None else batch.take(chosen) for chosen in planned]

        def finish(number: int, values: dict[str, Tensor]) -> None:
            if (part := parts[number]) is None:
                return
            where = ranges(starts[planned[number]], part["lengths"])
            for name in outputs:
                found[name][where] = values[name].cpu().numpy()

        feeds = [self._feed(part, batch) for part in parts]
        if feeds:
            with self._model.using(weights if ours else "policy"):
                self._passes(model).run(feeds, outputs, finish, backward=False, teachers=self._taught(feeds, outputs))
        return found

    def _taught(self, feeds: list[Feed], outputs: Sequence[str]) -> list[Teacher]:
        """Return what the teacher computes for each pass, if outputs are wanted that need it."""
        wanted = wanted_divergences(outputs)
        return self._passes(self._frozen["teacher"]).taught(feeds) if wanted and feeds else []

    def live(self, batch: Batch | None, loss: Spec) -> Any:
        """Return which sequences [B] of a batch can change the loss. The driver reads it from the last stage."""
        return super().live(self._ranks.share(batch), loss)

    def _plan(self, batch: Batch) -> list[Any]:
        """Return the sequences of each pass. None: a pass without targets, because other ranks have more.

        Interleaved stages need a multiple of their number.
        """
        parts = plan(batch, self._config.layout, self._config.micro_batch_tokens) if batch.sequences else []
        count = self._ranks.max(len(parts))
        if self._config.parallel.virtual > 1:
            count = -(-count // self._config.parallel.pipeline) * self._config.parallel.pipeline
        return [*parts, *[None] * (count - len(parts))]

    def _feed(self, part: Batch | None, batch: Batch) -> Feed:
        return self._feeder.nothing(batch.take([])) if part is None else self._feeder.feed(part)

    def _given(self) -> frozenset[str]:
        return outputs_of(self._config.head, self._config.teacher)

    def _drop_gradients(self) -> None:
        self._steps().drop_gradients()
