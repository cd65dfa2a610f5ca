"""From a micro-batch to the tensors of one forward pass, and the module that runs it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn

from whet.data.batch import Batch
from whet.errors import WhetError
from whet_fsdp2.blocks import AttentionPlan
from whet_fsdp2.layout import Layout, Rows, Targets, pack, used_lengths
from whet_fsdp2.narrowed import Narrowed, read_only_at
from whet_ops.logprobs import distribution_kl, token_logprobs, top_logprobs


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
    empty: bool = field(default=False)
    """Whether the pass has no targets and only keeps this rank in step with the others."""


def feed(batch: Batch, layout: Layout, device: torch.device) -> Feed:
    """Return the inputs of the forward pass for a NumPy micro-batch, on the device."""
    used = used_lengths(batch)
    if not used.any():
        return nothing(batch, layout, device)
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
        tensor(np.unique(targets.source)),
        tensor(targets.tokens),
        tensor(targets.where),
        _temperature(batch, targets, device),
        batch.tokens,
        _ids(batch, targets, device),
        passed,
    )


def nothing(batch: Batch, layout: Layout, device: torch.device) -> Feed:
    """Return the inputs of the smallest forward pass, for a batch without targets. Its outputs are not used."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    arguments: dict[str, Any] = {"input_ids": zero[None], "position_ids": zero[None], "use_cache": False}
    if layout != "padded":
        arguments["whet_plan"] = AttentionPlan(np.ones(1, np.int64), np.full(1, -1, np.int64))
    ids = zero.expand(1, batch["topk_ids"].shape[1]) if "topk_ids" in batch else None
    return Feed(arguments, zero, zero, zero, zero[:0], None, batch.tokens, ids, 0, empty=True)


def _ids(batch: Batch, targets: Targets, device: torch.device) -> Tensor | None:
    if "topk_ids" not in batch:
        return None
    return torch.from_numpy(np.asarray(batch["topk_ids"], np.int64)[targets.where]).to(device)


def _temperature(batch: Batch, targets: Targets, device: torch.device) -> Tensor | None:
    if "temperature" not in batch:
        return None
    temperature = np.asarray(batch["temperature"], np.float32)
    temperature = np.where(temperature > 0, temperature, np.float32(1))  # greedy: logprobs are those at 1
    if (temperature == 1).all():
        return None
    return torch.from_numpy(temperature[targets.sequence]).to(device)


class Root(nn.Module):
    """A Hugging Face causal model whose forward pass returns logprobs, so logits never leave the module."""

    probe = "logprobs"
    """An output that this module always has."""

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.narrowed: tuple[Narrowed, ...] = ()
        """Modules of the last layer that are computed only at the positions that are read."""
        self.teacher: tuple[Root, ...] = ()
        """The frozen model of the divergences, in a tuple so that it is not a submodule."""

    def forward(self, feed: Feed, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Return the wanted outputs and always `logprobs`: [M] or [M, K] each. See `whet.interfaces.backend`."""
        hidden, head = self._hidden(feed), self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        if "logits" in outputs:  # of a teacher: hidden states and head, as all logits at once need too much memory
            return {"hidden": hidden, "weight": head.weight, **({} if bias is None else {"bias": bias})}
        terms: dict[str, Any] = {"bias": bias, "temperature": feed.temperature}
        found = self._at_tokens(feed, outputs, hidden, head.weight, terms)
        for name in outputs:
            kind, _, k = name.partition(":")
            if kind in ("topk_ids", "topk_logprobs") and name not in found:
                ids, logprobs = top_logprobs(hidden, head.weight, int(k), chunk=self.chunk, **terms)
                found |= {f"topk_ids:{k}": ids.int(), f"topk_logprobs:{k}": logprobs}
        return found | self._divergences(feed, outputs, hidden, head.weight, terms)

    def _divergences(
        self, feed: Feed, outputs: Sequence[str], hidden: Tensor, weight: Tensor, terms: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Return the wanted divergences between this model and the teacher that the same workers hold."""
        both = ("kl_forward", "kl_reverse") if {"kl_forward", "kl_reverse"} & set(outputs) else ()
        mixtures = [name for name in outputs if name.startswith("jensen_shannon:")]
        if not both and not mixtures:
            return {}
        with torch.no_grad():
            other = self.teacher[0](feed, ("logits",))

        def divergences(beta: float | None = None) -> tuple[Tensor, ...]:
            return distribution_kl(
                hidden, weight, other["hidden"], other["weight"], other_bias=other.get("bias"), chunk=self.chunk,
                beta=beta, **terms,
            )  # fmt: skip

        found = {name: divergences(float(name.partition(":")[2]))[0] for name in mixtures}
        return found | (dict(zip(both, divergences(), strict=True)) if both else {})

    def _hidden(self, feed: Feed) -> Tensor:
        return read_hidden(self, feed)

    def _at_tokens(
        self, feed: Feed, outputs: Sequence[str], hidden: Tensor, weight: Tensor, terms: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Return `logprobs` and, from the same pass over the logits, `logprobs_at` and `entropy` if they are wanted."""
        targets = feed.targets
        if "logprobs_at" in outputs:
            if feed.ids is None:
                raise WhetError("the output logprobs_at is of the tokens in the column topk_ids, which is not there")
            targets = torch.cat([targets[:, None], feed.ids], 1)
        logprobs, entropy = token_logprobs(
            hidden, weight, targets, entropy="entropy" in outputs, chunk=self.chunk, **terms
        )
        found = {"logprobs": logprobs} if logprobs.ndim == 1 else {}
        if logprobs.ndim == 2:
            found = {"logprobs": logprobs[:, 0], "logprobs_at": logprobs[:, 1:]}
        return found if entropy is None else {**found, "entropy": entropy}


class ValueRoot(nn.Module):
    """A Hugging Face sequence classifier with one label. Its head is applied at every target position."""

    probe = "values"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.narrowed: tuple[Narrowed, ...] = ()
        """Modules of the last layer that are computed only at the positions that are read."""

    def forward(self, feed: Feed, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Return `values` [M] float32."""
        return {"values": self.model.score(read_hidden(self, feed))[:, 0].float()}


AnyRoot = Root | ValueRoot


def read_hidden(root: AnyRoot, feed: Feed) -> Tensor:
    """Return the last hidden states at the positions that are read: [M, hidden size]."""
    read_only_at(root.narrowed, feed.rows, feed.arguments["input_ids"].numel())
    hidden = root.model.base_model(**feed.arguments).last_hidden_state
    rows: Tensor = hidden.reshape(-1, hidden.shape[-1]).index_select(0, feed.source)
    return rows


def spread(feed: Feed, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a pass, [M] or [M, K], in the order of the micro-batch: [N] or [N, K], 0 elsewhere."""
    return {name: _spread(feed, values) for name, values in found.items()}


def _spread(feed: Feed, values: Tensor) -> Tensor:
    room = values.new_zeros(feed.count, *values.shape[1:])
    return room if feed.empty else room.index_copy(0, feed.where, values)
