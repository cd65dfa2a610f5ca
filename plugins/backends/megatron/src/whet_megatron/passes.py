"""Forward and backward passes of the micro-batches of a call, by Megatron's schedules.

    last stage    hidden states -> outputs at the targets -> loss -> backward
    other stages  hidden states go on to the next stage; the loss is never seen there

Every rank runs equally many passes: a rank that has fewer micro-batches runs passes without targets.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from whet_megatron.feed import Feed
from whet_megatron.model import HeldModel
from whet_ops.head_outputs import divergences, head_outputs
from whet_ops.logprobs import MATRIX, LogitRule
from whet_ops.vocabulary import WHOLE, Vocabulary
from whet_training.outputs import spread

Outputs = dict[str, Tensor]
Teacher = dict[str, Tensor]
"""What divergences need of a teacher: its hidden states `hidden` [m, H'] at this rank's targets, its head `weight`."""
Finish = Callable[[int, Outputs], Tensor | None]
"""(number of the pass, outputs in the order of its micro-batch: [N] or [N, K]) -> the objective, or None."""


@frozen(eq=False)
class Head:
    """From the hidden states of a pass to outputs."""

    model: HeldModel
    chunk: int
    rule: LogitRule = MATRIX

    def outputs(self, feed: Feed, hidden: Tensor, names: Sequence[str], teacher: Teacher | None = None) -> Outputs:
        """Return the wanted outputs of a micro-batch in its order. hidden [rows, tokens, H], as Megatron returns it."""
        at = self.read(feed, hidden)
        if self.model.value:
            head = self.model.head
            found = {"values": (at.to(head.dtype) @ head.T)[:, 0].float()}
        else:
            weight, rows = self.rows()
            terms = {"temperature": feed.temperature, "vocabulary": rows, "chunk": self.chunk, "rule": self.rule}
            found = head_outputs(names, at, weight, feed.targets, feed.ids, terms)
            if teacher is not None:
                found |= divergences(names, at, weight, {**teacher, "rule": self.rule}, terms)
        if feed.gathering is not None:
            found = {name: feed.gathering.gather(values) for name, values in found.items()}
        return spread(found, feed.where, feed.count)

    def read(self, feed: Feed, hidden: Tensor) -> Tensor:
        """Return the hidden states at the places that are read: [m, H]."""
        hidden = hidden.transpose(0, 1).contiguous()
        if self.model.config.sequence_parallel:
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

            # The gradient of each rank is whole: the head adds it up over the vocabulary.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, feed.source)
        return rows.to(self.model.dtype)  # Megatron makes the last stage's result float32

    def rows(self) -> tuple[Tensor, Vocabulary]:
        """Return this rank's rows of the head without padding, and which rows of the vocabulary they are.

        Padding would have logit 0 and take part in the softmax.
        """
        from megatron.core import parallel_state

        weight, size = self.model.head, self.model.architecture.vocabulary
        first = weight.shape[0] * parallel_state.get_tensor_model_parallel_rank()
        weight = weight[: max(0, min(weight.shape[0], size - first))]
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            return weight, WHOLE
        return weight, Vocabulary(size, first, parallel_state.get_tensor_model_parallel_group())


class Stopwatch:
    """Adds up the time of parts of a schedule. On a GPU by events, because waiting for it would stall the pipeline."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        """Return the time, or an event that will have it."""
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it
        event.record()
        return event

    def lap(self, begun: Any) -> None:
        """Add the time since a mark."""
        self._laps.append((begun, self.mark()))

    def seconds(self) -> float:
        """Return the sum. All work of the device must be done."""
        if self._on_gpu:
            return sum(float(begun.elapsed_time(ended)) for begun, ended in self._laps) / 1000
        return float(sum(ended - begun for begun, ended in self._laps))


@define(eq=False)
class Passes:
    """Runs the passes of one model."""

    head: Head
    device: torch.device
    forward: Stopwatch = field(init=False)
    """The time that this rank spent in forward passes and losses."""

    @forward.default
    def _new_stopwatch(self) -> Stopwatch:
        return Stopwatch(self.device)

    def run(
        self, feeds: Sequence[Feed], names: Sequence[str], finish: Finish, *, backward: bool,
        teachers: Sequence[Teacher] = (),
    ) -> None:  # fmt: skip
        """Run forward passes, and backward passes of what `finish` returns. `finish` is called on the last stage.

        `teachers`: of each pass what a teacher computed, on the last stage, if outputs are wanted that need it.
        """

        def close(number: int, hidden: Tensor) -> Tensor | None:
            teacher = teachers[number] if teachers else None
            return finish(number, self.head.outputs(feeds[number], hidden, names, teacher))

        self._run(feeds, close, backward=backward)

    def pass_through(self, feeds: Sequence[Feed]) -> None:
        """Run forward passes without gradient, for what routers see in them."""
        self._run(feeds, lambda number, hidden: None, backward=False)

    def taught(self, feeds: Sequence[Feed]) -> list[Teacher]:
        """Return what divergences need of this model, the teacher, for each pass. On other stages than the last: none.

        All passes of a teacher come before those of the model that learns, because a pipeline takes one model.
        """
        found: list[Teacher] = []

        def close(number: int, hidden: Tensor) -> None:
            found.append({"hidden": self.head.read(feeds[number], hidden), "weight": self.head.rows()[0]})

        self._run(feeds, close, backward=False)
        return found

    def _run(self, feeds: Sequence[Feed], close: Callable[[int, Tensor], Tensor | None], *, backward: bool) -> None:
        """Run Megatron's schedule. `close` gets the hidden states of each pass on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not feeds:  # the same on all ranks
            return
        model = self.head.model
        stages: list[Any] = model.chunks
        longest = max(feed.tokens.shape[1] for feed in feeds)
        numbered = [iter(enumerate(feeds)) for _ in stages]
        with nullcontext() if backward else evaluating(stages):
            get_forward_backward_func()(
                forward_step_func=self._step(close),
                data_iterator=numbered if len(stages) > 1 else numbered[0],
                model=stages if len(stages) > 1 else stages[0],
                num_microbatches=len(feeds),
                seq_length=longest * model.config.context_parallel_size,  # the shapes that are sent are exchanged
                micro_batch_size=1,
                forward_only=not backward,
            )
        if model.experts is not None:
            model.experts.leave()

    def _anchor(self, feed: Feed, hidden: Tensor) -> Tensor:
        """Return 0, which depends on all weights: a pass without targets of its own takes part in the backward pass of
        others.
        """
        nothing = hidden.sum() * 0.0
        return nothing if len(feed.source) else nothing + self.head.model.head.sum() * 0.0

    def _step(self, close: Callable[[int, Tensor], Tensor | None]) -> Callable[[Any, Any], Any]:
        """Return what Megatron's schedules call for one pass of one stage."""

        def step(feeds: Any, stage: Any) -> Any:
            number, feed = next(feeds)
            begun = self.forward.mark()
            if self.head.model.experts is not None and feed.entered is not None:
                self.head.model.experts.enter(feed.entered)
            hidden = stage(
                input_ids=feed.tokens, position_ids=feed.positions, attention_mask=None, packed_seq_params=feed.packed
            )
            self.forward.lap(begun)

            def finish(hidden: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
                begun = self.forward.mark()
                objective = close(number, hidden)
                value = self._anchor(feed, hidden) + (0.0 if objective is None else objective)
                self.forward.lap(begun)
                return value, torch.zeros((), dtype=torch.int, device=self.device), {}

            return hidden, finish

        return step


@contextmanager
def evaluating(stages: Sequence[Any]) -> Iterator[None]:
    """Compute without gradients and not in training mode, with stages that may be those of a model in training.

    In training mode Transformer Engine keeps the FP8 scales of each pass for a recomputation, which would then take
    those of a pass that had no backward pass.
    """
    modes = [stage.training for stage in stages]
    for stage in stages:
        stage.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for stage, mode in zip(stages, modes, strict=True):
            stage.train(mode)
