"""Log-probabilities of tokens from hidden states, one chunk of logits at a time.

The logits of all tokens at once, [M, V], are the largest tensor of a training step. This module holds the logits of one
chunk of tokens at a time, forward and backward. The backward pass computes them again.
"""

from __future__ import annotations  # the site is built without torch

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from whet_ops.distillation import jensen_shannon
from whet_ops.vocabulary import WHOLE, Vocabulary

CHUNK_BYTES = 128 << 20
"""Bytes of float32 logits in one chunk, if the size of a chunk is not given."""


@frozen
class LogitRule:
    """How logits follow from z = hidden @ weight.T + bias: `scale * z`, and then `softcap * tanh(... / softcap)`."""

    scale: float = 1.0
    softcap: float = 0.0
    """The bound of the logits (Gemma 2, arXiv:2408.00118, section 2). 0: no bound."""
    float32: bool = False
    """Keep the product in float32. Otherwise it is rounded to the dtype of the hidden states, as models do: in bfloat16
    a logit of 20 is off by up to 0.06 (ScaleRL, arXiv:2510.13786, section 3.2)."""

    def apply(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Return logits [M, V] float32. hidden [M, H] and matrix [V, H] have one dtype."""
        if not self.float32 or hidden.dtype == torch.float32:
            logits = (hidden @ matrix.T).float()
        elif hidden.is_cuda and not torch.is_grad_enabled():
            logits = torch.mm(hidden, matrix.T, out_dtype=torch.float32)  # untested on a GPU
        else:
            logits = hidden.float() @ matrix.float().T
        if bias is not None:
            logits += bias.float()
        if self.scale != 1:
            logits *= self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


MATRIX = LogitRule()
"""The rule of most models: logits are the product."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    entropy: bool = False,
    chunk: int = 0,
    vocabulary: Vocabulary = WHOLE,
    rule: LogitRule = MATRIX,
) -> tuple[Tensor, Tensor | None]:
    """Return each target's logprob under `log_softmax((hidden @ weight.T + bias) / temperature)`, and the entropy.

    hidden [M, H], weight [V, H], bias [V], temperature [M] float32. targets int64 are [M], or [M, K] for K tokens at
    each position. -> logprobs float32 in the shape of targets, entropy [M] float32 in nats or None. Both are
    differentiable in hidden, weight and bias. The product is computed in the dtype of `hidden`, the softmax in float32.
    `chunk` is the number of tokens whose logits are held at a time; 0: as many tokens as fill `CHUNK_BYTES`.
    `vocabulary` says which rows of the head weight and bias are, if ranks share them. `rule`: from product to logits.
    """
    if (
        hidden.ndim != 2
        or targets.ndim not in (1, 2)
        or targets.shape[:1] != hidden.shape[:1]
        or weight.shape[1] != hidden.shape[1]
    ):
        raise ValueError(
            f"wanted hidden [M, H], weight [V, H] and targets [M] or [M, K]; found {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    chunk = chunk or max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    several = targets if targets.ndim == 2 else targets[:, None]
    logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's own
        hidden, weight, bias, several, temperature, entropy, chunk, vocabulary, rule
    )
    return logprobs.view(targets.shape), entropies if entropy else None


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk: int = 0,
    vocabulary: Vocabulary = WHOLE,
    rule: LogitRule = MATRIX,
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens at each position and their logprobs: [M, k] int64, [M, k] float32.

    The likeliest token is first. The arguments are as in `token_logprobs`. Logprobs are over the whole vocabulary, not
    over the k tokens.
    """
    if not 1 <= k <= (tokens := vocabulary.size or weight.shape[0]):
        raise ValueError(f"wanted between 1 and {tokens} of the vocabulary's tokens, found {k}")
    chunk = chunk or max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = hidden.new_empty(len(hidden), k, dtype=torch.float32)
    matrix = weight.to(hidden.dtype)
    for part in _parts(len(hidden), chunk):
        found = _log_softmax(rule.apply(hidden[part], matrix, bias), temperature, part, vocabulary)
        logprobs[part], ids[part] = vocabulary.top(found, k)
    return ids, logprobs


def distribution_kl(
    hidden: Tensor,
    weight: Tensor,
    other_hidden: Tensor,
    other_weight: Tensor,
    *,
    bias: Tensor | None = None,
    other_bias: Tensor | None = None,
    temperature: Tensor | None = None,
    beta: float | None = None,
    chunk: int = 0,
    vocabulary: Vocabulary = WHOLE,
    rule: LogitRule = MATRIX,
    other_rule: LogitRule = MATRIX,
) -> tuple[Tensor, ...]:
    """Return the divergences of two models' next-token distributions p and q over the whole vocabulary, in nats.

        forward = KL(q || p) = sum_v q (log q - log p)        reverse = KL(p || q) = sum_v p (log p - log q)

    p comes from hidden [M, H] and weight [V, H], and is differentiable. q comes from other_hidden [M, H'] and
    other_weight [V, H'], and is not differentiable. temperature [M] divides the logits of both models. -> forward [M],
    reverse [M] float32. With a `beta`, the only result is the Jensen-Shannon divergence [M] of
    `whet_ops.distillation.jensen_shannon`. Logits of `chunk` tokens are held at a time. The backward pass computes them
    again.
    """
    from torch.utils.checkpoint import checkpoint

    if weight.shape[0] != other_weight.shape[0]:
        raise ValueError(f"the vocabularies have {weight.shape[0]} and {other_weight.shape[0]} tokens; wanted the same")
    chunk = chunk or max(1, CHUNK_BYTES // (8 * weight.shape[0]))
    hidden = vocabulary.shared(hidden)

    def both(part: slice) -> tuple[Tensor, ...]:
        log_p = _log_softmax(rule.apply(hidden[part], weight.to(hidden.dtype), bias), temperature, part, vocabulary)
        with torch.no_grad():
            matrix = other_weight.to(other_hidden.dtype)
            log_q = _log_softmax(
                other_rule.apply(other_hidden[part], matrix, other_bias), temperature, part, vocabulary
            )
        if beta is not None:
            lowest = torch.finfo(log_p.dtype).min / 4
            return (vocabulary.total(jensen_shannon(log_p.clamp(min=lowest), log_q.clamp(min=lowest), beta)),)
        return vocabulary.total(_kl(log_q, log_p)), vocabulary.total(_kl(log_p, log_q))

    found = [checkpoint(both, part, use_reentrant=False) for part in _parts(len(hidden), chunk)]
    nothing = hidden.new_zeros(0, dtype=torch.float32)
    columns = zip(*found, strict=True) if found else [[nothing]] * (1 if beta is not None else 2)
    return tuple(torch.cat(list(column)) for column in columns)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return KL(a || b) of each row.

    A token that a cannot produce adds 0. A token that a can produce and b cannot adds a large number.
    """
    lowest = torch.finfo(log_a.dtype).min / 4
    return (log_a.exp() * (log_a.clamp(min=lowest) - log_b.clamp(min=lowest))).sum(-1)


class _TokenLogprobs(torch.autograd.Function):
    """Logprobs and entropy, chunk by chunk.

    A single chunk is kept for the backward pass. With several chunks, the backward pass computes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        entropy: bool,
        chunk: int,
        vocabulary: Vocabulary,
        rule: LogitRule,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        logprobs = hidden.new_empty(targets.shape, dtype=torch.float32)
        entropies = hidden.new_empty(count if entropy else 0, dtype=torch.float32)
        matrix = weight.to(hidden.dtype)
        kept = None
        for part in _parts(count, chunk):
            log_p = _log_softmax(rule.apply(hidden[part], matrix, bias), temperature, part, vocabulary)
            logprobs[part] = vocabulary.pick(log_p, targets[part])
            if entropy:
                entropies[part] = vocabulary.total(_entropy(log_p))
            if count <= chunk and not rule.softcap and any(ctx.needs_input_grad[:3]):
                kept = log_p
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, entropies if entropy else None, kept)
        ctx.chunk, ctx.vocabulary, ctx.rule = chunk, vocabulary, rule
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, entropies, kept = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        rule: LogitRule = ctx.rule
        if of_logprobs is None and (of_entropy is None or entropies is None):
            return (None,) * 9
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        matrix = weight.to(hidden.dtype)
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if wants_weight else None
        to_bias = bias.new_zeros(bias.shape, dtype=torch.float32) if wants_bias else None
        for part in _parts(len(hidden), ctx.chunk):
            log_p, bound = kept, None
            if log_p is None:
                logits = rule.apply(hidden[part], matrix, bias)
                bound = 1 - (logits / rule.softcap).square() if rule.softcap else None  # the slope of the softcap
                log_p = _log_softmax(logits, temperature, part, ctx.vocabulary)
                del logits  # as large as what follows
            slope = _slope(
                log_p,
                targets[part],
                None if of_logprobs is None else of_logprobs[part],
                None if of_entropy is None or entropies is None else (of_entropy[part], entropies[part]),
                ctx.vocabulary,
            )
            if temperature is not None:
                slope.div_(temperature[part, None])
            if bound is not None:
                slope *= bound
            if rule.scale != 1:
                slope *= rule.scale
            if to_bias is not None:
                to_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if to_hidden is not None:
                torch.mm(slope, matrix, out=to_hidden[part])
            if to_weight is not None:
                if to_weight.dtype == slope.dtype:
                    to_weight.addmm_(slope.T, hidden[part])
                else:
                    to_weight += slope.T @ hidden[part]
        if to_hidden is not None:
            to_hidden = ctx.vocabulary.total(to_hidden)
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            None, None, None, None, None, None,
        )  # fmt: skip


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(begin, min(begin + chunk, count)) for begin in range(0, count, chunk)]


def _log_softmax(logits: Tensor, temperature: Tensor | None, part: slice, vocabulary: Vocabulary) -> Tensor:
    """Return log_softmax of the logits of one chunk, at this rank's rows: [chunk, V] float32. Overwrites the logits."""
    if temperature is not None:
        logits /= temperature[part, None]
    return vocabulary.log_softmax(logits)


def _entropy(log_p: Tensor) -> Tensor:
    # A token that cannot occur has log p = -inf and adds 0.
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def _slope(
    log_p: Tensor,
    targets: Tensor,
    of_logprobs: Tensor | None,
    of_entropy: tuple[Tensor, Tensor] | None,
    vocabulary: Vocabulary,
) -> Tensor:
    """Return the gradient with respect to the logits of one chunk: [chunk, V] float32."""
    p = log_p.exp()
    in_all = None if of_logprobs is None else of_logprobs.sum(1, keepdim=True)
    if of_entropy is None:
        assert in_all is not None
        slope = p.mul_(-in_all)
    else:
        gradient, entropy = of_entropy
        inner = log_p.clamp(min=torch.finfo(log_p.dtype).min).add_(entropy[:, None]).mul_(-gradient[:, None])
        if in_all is not None:
            inner -= in_all
        slope = p.mul_(inner)
    if of_logprobs is not None and vocabulary.group is None:
        slope.scatter_add_(1, targets, of_logprobs)
    elif of_logprobs is not None:
        rows, here = vocabulary.rows(targets, slope.shape[1])
        slope.scatter_add_(1, rows, of_logprobs * here)
    return slope
