"""From a micro-batch to the tensors of one forward pass, and from its outputs back to the micro-batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from whet.data.batch import Batch
from whet_fsdp2.blocks import AttentionPlan
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.context import Piece
from whet_training import outputs
from whet_training.layout import Ints, Layout, Rows, pack, used_lengths


@frozen
class Widths:
    """The lengths that a packed row may have: multiples of `step`, and `most`.

    Under tensor parallelism PyTorch plans each operator anew for each shape of its arguments. The plan takes a
    millisecond or two, longer than most operators take. Where rows have few lengths, few plans are made.
    """

    step: int = 1
    most: int = 0

    def of(self, tokens: int) -> int:
        """Return the least allowed length of a row of so many tokens."""
        return max(tokens, min(-(-tokens // self.step) * self.step, self.most))

    def pad(self, row: Ints) -> Ints:
        """Return a row with zeros behind it: [T] -> [W]. They take no part in the attention."""
        return np.concatenate([row, np.zeros(self.of(len(row)) - len(row), row.dtype)])

    def extend(self, read: Ints, places: int) -> Ints:
        """Return the positions that are read, and some that are not, so that their number is an allowed length."""
        more = min(self.of(len(read)), places) - len(read)
        return np.concatenate([read, np.setdiff1d(np.arange(places), read)[:more]]) if more > 0 else read


EXACT = Widths()
"""A row of any length is not padded."""
FEW = 16
"""Lengths of rows up to `micro_batch_tokens` under tensor parallelism."""


def widths(config: Fsdp2Config) -> Widths:
    """Return the lengths that packed rows may have."""
    tokens = config.micro_batch_tokens
    return Widths(-(-tokens // FEW), tokens) if config.parallel.tensor > 1 else EXACT


@frozen(eq=False)
class Feed:
    """The inputs of one forward pass, and the tokens whose logprobs are computed."""

    arguments: Mapping[str, Any]
    """Arguments of the model without its head."""
    source: Tensor
    """[M] rows of the flattened hidden states from which the targets are predicted."""
    rows: Tensor
    """[R] the distinct values of `source`, and further positions if few numbers of rows are allowed."""
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


def feed(batch: Batch, layout: Layout, device: torch.device, context: Any = None, widths: Widths = EXACT) -> Feed:
    """Return the inputs of the forward pass for a NumPy micro-batch, on the device.

    `context`: the process group of the ranks that share a row. `widths`: the lengths that a packed row may have.
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
        source, passed = targets.source, len(found.tokens)
        tokens, positions = widths.pad(found.tokens), widths.pad(found.positions)
        if context is not None:
            piece = Piece.of(context, len(tokens), source)
            tokens, positions, mine = piece.cut(tokens), piece.cut(positions), piece.mine
            targets = evolve(targets, source=source - piece.begin)
        arguments = {
            "input_ids": tensor(tokens)[None],
            "position_ids": tensor(positions)[None],
            "whet_plan": AttentionPlan(found.lengths, found.prefix, piece=piece),
        }
    read = np.unique(targets.source[mine])
    return Feed(
        {**arguments, "use_cache": False},
        tensor(targets.source[mine]),
        tensor(widths.extend(read, arguments["input_ids"].numel())),
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
