"""Forward and backward passes of the micro-batches of a call, by Megatron's schedules.

    last stage    hidden states -> outputs at the targets -> loss -> backward
    other stages  hidden states go on to the next stage; the loss is never seen there

Every rank runs equally many passes: a rank that has fewer micro-batches runs passes without targets.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from whet_megatron.feed import Feed
from whet_megatron.model import HeldModel
from whet_ops.head_outputs import head_outputs
from whet_ops.vocabulary import WHOLE, Vocabulary
from whet_training.outputs import spread
from whet_training.ranks import clock

Outputs = dict[str, Tensor]
Finish = Callable[[int, Outputs], Tensor | None]
"""(number of the pass, outputs in the order of its micro-batch: [N] or [N, K]) -> the objective, or None."""


@frozen(eq=False)
class Head:
    """From the hidden states of a pass to outputs."""

    model: HeldModel
    chunk: int

    def outputs(self, feed: Feed, hidden: Tensor, names: Sequence[str]) -> Outputs:
        """Return the wanted outputs of a micro-batch in its order. hidden [rows, tokens, H], as Megatron returns it."""
        at = self._read(feed, hidden)
        if self.model.value:
            found = {"values": (at @ self.model.head.T.to(at.dtype))[:, 0].float()}
        else:
            weight, rows = self._rows()
            terms = {"temperature": feed.temperature, "vocabulary": rows, "chunk": self.chunk}
            found = head_outputs(names, at, weight, feed.targets, feed.ids, terms)
        if feed.gathering is not None:
            found = {name: feed.gathering.gather(values) for name, values in found.items()}
        return spread(found, feed.where, feed.count)

    def _read(self, feed: Feed, hidden: Tensor) -> Tensor:
        """Return the hidden states at the places that are read: [m, H]."""
        hidden = hidden.transpose(0, 1).contiguous()
        if self.model.config.sequence_parallel:
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

            # The gradient of each rank is whole: the head adds it up over the vocabulary.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, feed.source)
        return rows.to(self.model.dtype)  # Megatron makes the last stage's result float32

    def _rows(self) -> tuple[Tensor, Vocabulary]:
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


@define(eq=False)
class Passes:
    """Runs the passes of one model."""

    head: Head
    device: torch.device
    forward_seconds: float = 0.0
    """Seconds that this rank spent in forward passes and losses."""

    def run(self, feeds: Sequence[Feed], names: Sequence[str], finish: Finish, *, backward: bool) -> None:
        """Run forward passes, and backward passes of what `finish` returns. `finish` is called on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        model = self.head.model
        stages: list[Any] = model.chunks
        longest = max(feed.tokens.shape[1] for feed in feeds)
        numbered = [iter(enumerate(feeds)) for _ in stages]
        with nullcontext() if backward else torch.no_grad():
            get_forward_backward_func()(
                forward_step_func=self._step(names, finish),
                data_iterator=numbered if len(stages) > 1 else numbered[0],
                model=stages if len(stages) > 1 else stages[0],
                num_microbatches=len(feeds),
                seq_length=longest * model.config.context_parallel_size,  # the shapes that are sent are exchanged
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _anchor(self, feed: Feed, hidden: Tensor) -> Tensor:
        """Return 0, which depends on all weights: a pass without targets takes part in the backward pass of others."""
        nothing = hidden.sum() * 0.0
        return nothing if len(feed.where) else nothing + self.head.model.head.sum() * 0.0

    def _step(self, names: Sequence[str], finish: Finish) -> Callable[[Any, Any], Any]:
        """Return what Megatron's schedules call for one pass of one stage."""

        def step(feeds: Any, stage: Any) -> Any:
            number, feed = next(feeds)
            begun = clock(self.device)
            hidden = stage(
                input_ids=feed.tokens, position_ids=feed.positions, attention_mask=None, packed_seq_params=feed.packed
            )
            self.forward_seconds += clock(self.device) - begun

            def close(hidden: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
                begun = clock(self.device)
                objective = finish(number, self.head.outputs(feed, hidden, names))
                value = self._anchor(feed, hidden) + (0.0 if objective is None else objective)
                self.forward_seconds += clock(self.device) - begun
                return value, torch.zeros((), dtype=torch.int, device=self.device), {}

            return hidden, close

        return step
