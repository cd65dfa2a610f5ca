"""Decodes with Megatron's inference: its paged cache, its forward pass, and requests that come and go at any token.

One step, on every rank of a replica:

    queue -> add_request                    as far as `prefill_tokens` allow
    DynamicInferenceContext                 lays out tokens, positions and blocks of the cache
    GPTInferenceWrapper                     forward pass over tensor parallel ranks and pipeline stages
    leader: logits -> token, logprob, end   broadcast to the replica
    update_requests                         frees the blocks of rows that end

All ranks of a replica are called with equal requests and get equal tokens, so their caches change alike.

Megatron's own `TextGenerationController` is not used: it draws the tokens of all requests from one random generator,
so a token would depend on the other requests of its batch, and its logprobs leave out the temperature.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from whet.data.records import Completion, Progress, Request, Stop
from whet.errors import WhetError
from whet_generation.completeness import checked_logprobs, nothing_yet, one_token
from whet_generation.sampling import Sampler
from whet_generation.stopping import BoolArray, StopStrings
from whet_megatron.generator.attention import plain_attention
from whet_megatron.groups import Ranks
from whet_megatron.model import HeldModel
from whet_megatron.passes import evaluating
from whet_training.ranks import members

Outcome = Completion | Progress | tuple[str, str]
"""A completion, or a token of a running one, or (id, why the request failed)."""

BLOCK_TOKENS = 256
"""Tokens of a block of the cache. flash-attn wants a multiple of 256."""
PLAIN_BLOCK_TOKENS = 16
"""The same for plain attention, which any number suits: most tests have short sequences."""
ROUNDED_TOKENS = 64
"""Megatron rounds the tokens of a forward pass up to a multiple of it."""


@define(eq=False)
class _Row:
    """A request that waits or runs."""

    request: Request
    limit: int
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    versions: list[tuple[int, int]] = field(factory=list)
    aborted: bool = False
    enders: BoolArray | None = None
    """Which tokens may complete one of the stop strings. None: no token of the row has been looked at."""


class Engine:
    """The engine of one rank."""

    def __init__(
        self, model: HeldModel, ranks: Ranks, strings: StopStrings, *, max_batch: int, cache_gib: float,
        prefill_tokens: int, max_length: int,
    ) -> None:  # fmt: skip
        """Allocate the cache. `max_length`: the longest sequence, prompt and completion."""
        self._model, self._ranks, self._strings = model, ranks, strings
        self._stage = model.weights.stages[-1]
        self._prefill_tokens, self._max_length = prefill_tokens, max_length
        tensor, self._plain = ranks.sizes.tensor, model.layers == "test"
        self.block_tokens = PLAIN_BLOCK_TOKENS if self._plain else BLOCK_TOKENS
        # Sequence parallel ranks share the tokens of a pass evenly.
        self._context = self._make_context(cache_gib, -(-max_batch // tensor) * tensor)
        self.blocks = int(self._context.block_allocator.active_count)
        """Blocks of the cache, of `block_tokens` each."""
        self._wrapper = self._wrapped()
        mine = members(ranks.grid, ranks.rank, "tensor", "pipeline")
        self._leader = mine[-tensor]
        """The rank that samples: the first of the last stage."""
        self._rows: dict[int, _Row] = {}
        self._queue: deque[_Row] = deque()
        self._count = 0
        self._sampler: tuple[tuple[int, ...], Sampler] | None = None

    def _make_context(self, cache_gib: float, max_batch: int) -> Any:
        from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

        arch, sizes = self._model.architecture, self._ranks.sizes
        multiple = ROUNDED_TOKENS * sizes.tensor
        # A token of each row, and the prompts of a pass, of which one may be as long as a sequence
        tokens = max_batch + max(self._prefill_tokens, self._max_length)
        return DynamicInferenceContext(
            params_dtype=self._model.dtype,
            num_layers=arch.layers // sizes.pipeline,
            kv_channels=arch.head_dim,
            num_attention_heads=arch.kv_heads,
            max_sequence_length=self._max_length,
            buffer_size_gb=cache_gib,
            max_requests=max_batch,
            max_tokens=-(-tokens // multiple) * multiple,
            block_size_tokens=self.block_tokens,
        )

    def _wrapped(self) -> Any:
        from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
        from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig

        arch = self._model.architecture
        config = InferenceWrapperConfig(
            hidden_size=arch.hidden,
            params_dtype=self._model.dtype,
            inference_batch_times_seqlen_threshold=-1,
            padded_vocab_size=arch.vocabulary,
        )
        return GPTInferenceWrapper(self._stage, config, self._context)

    @property
    def leads(self) -> bool:
        """Return whether the driver reads outcomes from this rank."""
        return self._ranks.rank == self._leader

    def add(self, requests: Sequence[tuple[Request, int]]) -> None:
        """Queue requests, each with the most tokens of its completion. The driver sends no more than there is room."""
        self._queue += [_Row(request, limit) for request, limit in requests]

    def abort(self, ids: Sequence[str]) -> list[Outcome]:
        """End requests: waiting ones at once, with their outcomes as the result, running ones at their next token."""
        chosen = set(ids)
        ended = [row.request.id for row in self._queue if row.request.id in chosen]
        self._queue = deque(row for row in self._queue if row.request.id not in chosen)
        for row in self._rows.values():
            row.aborted = row.aborted or row.request.id in chosen
        return [nothing_yet(id_) for id_ in ended]

    def run(self, steps: int, version: int) -> list[Outcome]:
        """Take so many steps, or fewer if all requests end. Return what happened, on the leader alone.

        version: of the weights in use.
        """
        found: list[Outcome] = []
        self._stage.set_is_first_microbatch()  # in FP8: quantise the weights anew, which a step may have changed
        with evaluating([self._stage]), plain_attention(self._stage) if self._plain else nullcontext():
            for _ in range(steps):
                self._admit()
                if not self._rows:
                    break
                found += self._step(version)
        return found

    def drop(self) -> None:
        """Forget all requests, after an error."""
        self._queue.clear()
        self._rows.clear()
        if self._context.is_tensor_state_allocated:
            self._context.reset()

    def free(self) -> int:
        """Free the cache. Return its number of bytes."""
        if not self._context.is_tensor_state_allocated:
            return 0
        size = int(self._context.memory_buffer.nbytes)
        self._context.deallocate_all_tensors()
        return size

    def allocate(self) -> None:
        """Make the cache again."""
        if not self._context.is_tensor_state_allocated:
            self._context.allocate_all_tensors(is_init=False)
            self._context.reset()

    def _admit(self) -> None:
        """Add waiting requests to the next forward pass, until their prompts have `prefill_tokens`."""
        from megatron.core.inference.inference_request import DynamicInferenceRequest
        from megatron.core.inference.sampling_params import SamplingParams

        tokens = 0
        while self._queue:
            tokens += len(self._queue[0].request.tokens)
            if tokens > self._prefill_tokens and tokens > len(self._queue[0].request.tokens):
                return
            row = self._queue.popleft()
            self._count += 1
            self._rows[self._count] = row
            self._context.add_request(
                DynamicInferenceRequest(
                    request_id=self._count,
                    prompt_tokens=torch.from_numpy(row.request.tokens.astype(np.int64)).to(self._ranks.device),
                    sampling_params=SamplingParams(num_tokens_to_generate=row.limit, termination_id=-1),
                )
            )

    def _step(self, version: int) -> list[Outcome]:
        """Add a token to each row."""
        context = self._context
        context.initialize_attention_state()
        hidden = self._forward(*context.current_input_and_position_ids())
        numbers = tuple(context.request_ids[context.paused_request_count : context.total_request_count].tolist())
        rows = [self._rows[number] for number in numbers]
        drawn, found = torch.zeros(2, len(rows), dtype=torch.int64, device=self._ranks.device), list[Outcome]()
        if self._stage.post_process:
            logits = self._logits(hidden)
            if self.leads:
                drawn, found = self._sampled(numbers, rows, logits, version)
        self._share(drawn)
        ended = drawn[1].cpu().numpy() > 0
        context.update_requests((1 - drawn[1]).int(), drawn[0].clone())
        for number, over in zip(numbers, ended, strict=True):
            if over:
                del self._rows[number]
        if context.paused_request_count:  # the driver reserves the blocks of the longest completion
            raise WhetError(f"the cache has no blocks for {context.paused_request_count} running requests")
        return found

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states of the last token of each row, [rows, H], on the last stage."""
        inputs = {"tokens": tokens, "position_ids": positions, "attention_mask": None}
        # Its `run_one_forward_step` computes in inference mode: what modules keep then, training could not use.
        if self._ranks.sizes.pipeline == 1:
            hidden: Tensor = self._wrapper.forward_pass_without_pipeline_parallel(inputs)
        else:
            hidden = self._wrapper.forward_pass_with_pipeline_parallel_small_input_batch(inputs)
        return hidden[0] if hidden is not None else torch.empty(0)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, V] on each rank of the last stage. Padding of the vocabulary is at its end."""
        from megatron.core import parallel_state

        head = self._model.head
        local = (hidden.to(head.dtype) @ head.T).float()
        parts = [local]
        if self._ranks.sizes.tensor > 1:
            parts = [torch.empty_like(local) for _ in range(self._ranks.sizes.tensor)]
            torch.distributed.all_gather(parts, local, group=parallel_state.get_tensor_model_parallel_group())
        return torch.cat(parts, -1)[:, : self._model.architecture.vocabulary]

    def _sampled(
        self, numbers: tuple[int, ...], rows: Sequence[_Row], logits: Tensor, version: int
    ) -> tuple[Tensor, list[Outcome]]:
        """Draw a token for each row. Return tokens and whether the row ends with it, [2, rows], and the outcomes."""
        if self._sampler is None or self._sampler[0] != numbers:
            samplings = [row.request.sampling for row in rows]
            self._sampler = numbers, Sampler(samplings, [row.request.seed for row in rows], logits.device)
        sampler = self._sampler[1]
        tokens, logprobs = sampler.draw(logits, np.array([len(row.tokens) for row in rows]))
        found = _reports(rows, tokens, logprobs, sampler, logits)
        ended = torch.zeros_like(tokens)
        for place, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
            if not row.versions or row.versions[-1][1] != version:
                row.versions.append((len(row.tokens), version))
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if (stop := self._ending(row)) is not None:
                ended[place] = 1
                found.append(_outcome(row, stop))
        return torch.stack([tokens, ended]), found

    def _ending(self, row: _Row) -> Stop | None:
        """Return why a row ends with its last token. None: it goes on."""
        sampling, token = row.request.sampling, row.tokens[-1]
        if token in sampling.stop_tokens:
            return "stop"
        if (
            sampling.stop
            and self._may_complete(row, token)
            and self._strings.completed(np.array(row.tokens), sampling.stop)
        ):
            return "stop"
        if len(row.tokens) >= row.limit:
            return "length"
        return "abort" if row.aborted else None

    def _may_complete(self, row: _Row, token: int) -> bool:
        if row.enders is None:
            row.enders = self._strings.enders(row.request.sampling.stop, self._model.architecture.vocabulary)
        return bool(row.enders[token])

    def _share(self, drawn: Tensor) -> None:
        """Bring what the leader drew to all ranks of the replica."""
        from megatron.core import parallel_state

        if self._ranks.sizes.tensor * self._ranks.sizes.pipeline > 1:
            torch.distributed.broadcast(drawn, self._leader, group=parallel_state.get_model_parallel_group())


def _outcome(row: _Row, stop: Stop) -> Outcome:
    try:
        logprobs = checked_logprobs(np.array(row.logprobs, np.float32), row.request, "the model")
    except WhetError as error:
        return row.request.id, str(error)
    return Completion(row.request.id, np.array(row.tokens, np.int64), logprobs, stop, tuple(row.versions))


def _reports(rows: Sequence[_Row], tokens: Tensor, logprobs: Tensor, sampler: Sampler, logits: Tensor) -> list[Outcome]:
    """Return the tokens of rows whose callers want them while they are sampled."""
    shown = [place for place, row in enumerate(rows) if row.request.progress is not None]
    if not shown:
        return []
    most = max(row.request.progress or 0 for row in rows)
    top, their = sampler.likeliest(logits, most) if most else (tokens[:, None], logprobs[:, None])
    return [
        one_token(
            rows[i].request.id,
            len(rows[i].tokens),
            int(tokens[i]),
            float(logprobs[i]),
            top[i, : rows[i].request.progress].tolist(),
            their[i, : rows[i].request.progress].tolist(),
        )
        for i in shown
    ]
