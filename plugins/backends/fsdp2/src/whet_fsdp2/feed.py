"""From a micro-batch to the tensors of one forward pass, and from its outputs back to the micro-batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from whet.data.batch import Batch
from whet_fsdp2.blocks import AttentionPlan
from whet_fsdp2.context import Piece
from whet_training import outputs
from whet_training.layout import Layout, Rows, pack, used_lengths


@frozen(eq=False)
class Feed:
    """The inputs of one forward pass, and the tokens whose logprobs are computed."""

    arguments: Mapping[str, Any]
    """Arguments of the model without its head."""
    source: Tensor
    """[M] rows of the flattened hidden states from which the targets are predicted."""
    rows: Tensor
    """[R] the distinct values of `source`."""
    targets: Tensor
    """[M] the target tokens."""
    where: Tensor
    """[M] positions of the targets among the N tokens of the micro-batch."""
    temperature: Tensor | None
    """[M] float32. None: 1 everywhere."""
    count: int
    """N, the number of tokens of the micro-batch."""
    ids: Tensor | None
    """[M, K] further tokens at each target position, from the column `topk_ids`."""
    passed: int
    """Tokens that go through the model, without padding."""
    piece: Piece | None = None
    """This rank's part of the row, if ranks share it. Then everything but `where` and `count` is of this part."""
    empty: bool = field(default=False)
    """Whether the pass has no targets and only keeps this rank in step with the others."""


def feed(batch: Batch, layout: Layout, device: torch.device, context: Any = None) -> Feed:
    """Return the inputs of the forward pass for a NumPy micro-batch, on the device.

    `context`: the process group of the ranks that share a row.
    """
    used = used_lengths(batch)
    if not used.any():
        return nothing(batch, layout, device, context)
    found = pack(batch, layout)
    targets, piece = found.targets, None
    mine: Any = slice(None)

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
        tokens, positions, source = found.tokens, found.positions, targets.source
        if context is not None:
            piece = Piece.of(context, len(tokens), source)
            tokens, positions, mine = piece.cut(tokens), piece.cut(positions), piece.mine
            targets = evolve(targets, source=source - piece.begin)
        arguments = {
            "input_ids": tensor(tokens)[None],
            "position_ids": tensor(positions)[None],
            "whet_plan": AttentionPlan(found.lengths, found.prefix, piece=piece),
        }
        passed = len(found.tokens)
    return Feed(
        {**arguments, "use_cache": False},
        tensor(targets.source[mine]),
        tensor(np.unique(targets.source[mine])),
        tensor(targets.tokens[mine]),
        tensor(targets.where),
        outputs.temperatures(batch, targets.sequence[mine], device),
        batch.tokens,
        outputs.ids_at(batch, targets.where[mine], device),
        passed,
        piece,
    )


def nothing(batch: Batch, layout: Layout, device: torch.device, context: Any = None) -> Feed:
    """Return the inputs of the smallest forward pass, for a batch without targets. Its outputs are not used."""
    zero, piece = torch.zeros(1, dtype=torch.int64, device=device), None
    arguments: dict[str, Any] = {"input_ids": zero[None], "position_ids": zero[None], "use_cache": False}
    if layout != "padded":
        if context is not None:
            piece = Piece.of(context, 1, np.zeros(1, np.int64))
        arguments["whet_plan"] = AttentionPlan(np.ones(1, np.int64), np.full(1, -1, np.int64), piece=piece)
    read = zero if piece is None else zero[: len(piece.mine)]
    ids = read.expand(len(read), batch["topk_ids"].shape[1]) if "topk_ids" in batch else None
    return Feed(arguments, read, read, read, zero[:0], None, batch.tokens, ids, 0, piece, empty=True)


def spread(feed: Feed, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a pass, [M] or [M, K], in the order of the micro-batch: [N] or [N, K], 0 elsewhere."""
    return outputs.spread(found, feed.where, feed.count)
