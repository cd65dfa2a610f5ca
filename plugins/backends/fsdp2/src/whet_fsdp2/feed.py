"""From a micro-batch to the tensors of one forward pass, and the module that runs it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn

from whet.data.batch import Batch
from whet.ops.logprobs import token_logprobs
from whet_fsdp2.blocks import AttentionPlan
from whet_fsdp2.layout import Layout, Rows, Targets, pack, used_lengths


@frozen(eq=False)
class Feed:
    """One forward pass: what the model gets, and which logprobs are wanted of it."""

    arguments: Mapping[str, Any]
    """Of the model without its head."""
    source: Tensor
    """[M] rows of the flattened hidden states."""
    targets: Tensor
    """[M] tokens."""
    where: Tensor
    """[M] their places among the N tokens of the micro-batch."""
    temperature: Tensor | None
    """[M] float32; None: 1 everywhere."""
    count: int
    """N"""
    passed: int
    """Tokens that go through the model, padding not counted."""
    empty: bool = field(default=False)
    """Whether there is nothing to compute and the pass only keeps the ranks in step."""


def feed(batch: Batch, layout: Layout, device: torch.device) -> Feed:
    """Lay out a NumPy micro-batch and bring it to the device."""
    used = used_lengths(batch)
    if not used.any():
        return nothing(batch.tokens, layout, device)
    found = pack(batch, layout)

    def tensor(array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    if isinstance(found, Rows):
        positions = np.tile(np.arange(found.tokens.shape[1]), (len(found.tokens), 1))
        arguments: dict[str, Any] = {
            "input_ids": tensor(found.tokens),
            "attention_mask": tensor(found.mask.astype(np.int64)),
            "position_ids": tensor(positions),
        }
        passed = int(found.mask.sum())
    else:
        arguments = {
            "input_ids": tensor(found.tokens)[None],
            "position_ids": tensor(found.positions)[None],
            "whet_plan": AttentionPlan(found.lengths, found.prefix),
        }
        passed = len(found.tokens)
    targets = found.targets
    return Feed(
        {**arguments, "use_cache": False},
        tensor(targets.source),
        tensor(targets.tokens),
        tensor(targets.where),
        _temperature(batch, targets, device),
        batch.tokens,
        passed,
    )


def nothing(count: int, layout: Layout, device: torch.device) -> Feed:
    """Make the smallest forward pass, whose logprobs go nowhere."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    arguments: dict[str, Any] = {"input_ids": zero[None], "position_ids": zero[None], "use_cache": False}
    if layout != "padded":
        arguments["whet_plan"] = AttentionPlan(np.ones(1, np.int64), np.full(1, -1, np.int64))
    return Feed(arguments, zero, zero, zero[:0], None, count, 0, empty=True)


def _temperature(batch: Batch, targets: Targets, device: torch.device) -> Tensor | None:
    if "temperature" not in batch:
        return None
    temperature = np.asarray(batch["temperature"], np.float32)
    temperature = np.where(temperature > 0, temperature, np.float32(1))  # greedy: logprobs are those at 1
    if (temperature == 1).all():
        return None
    return torch.from_numpy(temperature[targets.sequence]).to(device)


class Root(nn.Module):
    """A Hugging Face causal model whose forward pass ends in logprobs, so that logits never leave it."""

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk

    def forward(self, feed: Feed, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Give `logprobs` and, where wanted, `entropy`: [M] float32 each."""
        hidden = self.model.base_model(**feed.arguments).last_hidden_state
        head = self.model.get_output_embeddings()
        logprobs, entropy = token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]).index_select(0, feed.source),
            head.weight,
            feed.targets,
            bias=getattr(head, "bias", None),
            temperature=feed.temperature,
            entropy="entropy" in outputs,
            chunk=self.chunk,
        )
        return {"logprobs": logprobs} if entropy is None else {"logprobs": logprobs, "entropy": entropy}


def spread(feed: Feed, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put the logprobs [M] of a pass into the micro-batch's order [N], 0 elsewhere."""
    if feed.empty:
        return {name: values.new_zeros(feed.count) for name, values in found.items()}
    return {name: values.new_zeros(feed.count).index_copy(0, feed.where, values) for name, values in found.items()}
