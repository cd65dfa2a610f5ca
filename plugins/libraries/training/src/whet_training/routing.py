"""The load of experts: sums over tokens, from which the balancing loss, the z-loss and their metrics are made.

    balance loss   E * sum over experts of f * P        f = chosen / tokens, P = mean probability
    z-loss         mean of logsumexp(logits)^2

P is differentiable, f is not. With f of the whole batch known before the first backward pass, the loss is a sum over
tokens, as every other term is:

    E / T * sum over tokens and experts of f * p

A token counts once for each sequence that it is part of, if it enters the forward pass: its weight is their number, and
that of padding is 0. Both losses are means over layers, so each layer adds its own part, on whichever rank it lies.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from whet.data import metrics
from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet.errors import WhetError
from whet_training.experts import COLUMN, ExpertsConfig
from whet_training.layout import used_lengths


@frozen(eq=False)
class Load:
    """Sums over the tokens of one forward pass through one layer."""

    chosen: Tensor
    """[E] float64, tokens of each expert."""
    chances: Tensor
    """[E] probabilities of each expert. Differentiable."""
    squares: Tensor
    """[] squares of logsumexp(logits). Differentiable."""
    entropy: Tensor
    """[] entropies of the router's distribution, in nats."""


def load(logits: Tensor, chosen: Tensor, weights: Tensor) -> Load:
    """Return the load of a layer. logits [T, E], chosen [T, k] int64, weights [T] float32."""
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    chances, squares = weights @ logprobs.exp(), weights @ logits.logsumexp(-1).square()
    with torch.no_grad():
        entropy = weights @ -(logprobs.exp() * logprobs).sum(-1)
    return Load(tokens_of(chosen, weights, logits.shape[1]), chances, squares, entropy)


def tokens_of(chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Return the tokens of each expert [E] float64. chosen [T, k] int64, weights [T]."""
    room = torch.zeros(experts, dtype=torch.float64, device=weights.device)
    return room.index_add_(0, chosen.reshape(-1), weights.double()[:, None].expand(chosen.shape).reshape(-1))


def term(config: ExpertsConfig, found: Load, shares: Tensor, tokens: float, scale: float, layers: int) -> Tensor:
    """Return the weighted losses of one layer of `layers`, for the tokens of one forward pass.

    shares [E]: f of the layer. tokens: T of the whole step. scale: 1 / T, of the batch or of the micro-batch and over
    their number.
    """
    value = found.squares * (config.z_loss / (tokens * layers))
    if config.balance:
        value = value + _balance(found, shares, config.balance * scale, layers)
    return value


def _balance(found: Load, shares: Tensor, scale: float, layers: int) -> Tensor:
    return (shares * found.chances).sum() * (scale * len(shares) / layers)


def disagreement(chosen: Tensor, own: Tensor, sampled: Tensor, at: Tensor) -> Tensor:
    """Return [3]: compared tokens, and the sums of the shares of their experts that did not compute, or that the router
    itself would not choose.

    chosen, own [T, k]: the experts that computed, and those of the router's choice. sampled [U, k]: the sampler's, -1
    where they are not known; at [U]: the tokens of the pass that they belong to.
    """
    sampled = sampled.long()
    known = (sampled[:, 0] >= 0).float()
    missing = [1 - (one[at][:, :, None] == sampled[:, None]).any(1).float().mean(1) for one in (chosen, own)]
    return torch.stack([known.sum(), *(known @ share for share in missing)])


class Sums:
    """Sums over the forward passes of a step on one rank, of the layers that it holds; the others are 0."""

    def __init__(self, layers: int, experts: int, device: torch.device, config: ExpertsConfig | None = None) -> None:
        self._shape, self._config = (layers, experts), config or ExpertsConfig()
        self._loads = torch.zeros(2, layers, experts, dtype=torch.float64, device=device)
        self._scalars = torch.zeros(6, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, layer: int, found: Load, compared: Tensor | None) -> None:
        """Add a pass through a layer. compared: what `disagreement` returns, or None."""
        self._loads[:, layer] += torch.stack([found.chosen, found.chances.double()])
        self._scalars[:2] += torch.stack([found.entropy, found.squares]).double()
        if compared is not None:
            self._scalars[3:] += compared

    @torch.no_grad()
    def add_balance(self, found: Load, shares: Tensor, scale: float) -> None:
        """Add the balance loss of a pass through a layer. shares, scale: those of its `term`."""
        self._scalars[2] += _balance(found, shares, scale, self._shape[0])

    def numbers(self) -> list[float]:
        """Return all sums as a list, to be added up over ranks."""
        flat: list[float] = torch.cat([self._loads.flatten(), self._scalars]).tolist()
        return flat

    def metrics(self, whole: Sequence[float], tokens: float, *, replay: bool) -> dict[str, Metric]:
        """Return the metrics of a step. whole: `numbers` over all ranks. tokens: T of the step."""
        layers, experts = self._shape
        chosen, chances = np.reshape(whole[:-6], (2, layers, experts))
        entropy, squares, balance, compared, different, overruled = whole[-6:]
        if not tokens:
            return {}
        loads = chosen / chosen.sum(1, keepdims=True) * experts  # 1: as many tokens as every other expert
        if not self._config.balance:  # nothing is trained: that of the whole batch
            whole_model = self._config.balance_of == "model"
            shares = np.broadcast_to(chosen.mean(0), chosen.shape) if whole_model else chosen
            balance = experts * (shares / tokens * chances / tokens).sum(1).mean()
        found = {
            "experts/load_max": metrics.mean(loads.max(1).mean()),
            "experts/load_min": metrics.mean(loads.min(1).mean()),
            "experts/idle": metrics.mean(float((chosen == 0).mean())),
            "experts/entropy": metrics.mean(entropy / (tokens * layers)),
            "experts/balance_loss": metrics.mean(balance),
            "experts/z_loss": metrics.mean(squares / (tokens * layers)),
        }
        if compared:
            found["routing/disagreement"] = metrics.mean(different / compared)
            if replay:
                found["routing/overruled"] = metrics.mean(overruled / compared)
        return found


def shares_of(config: ExpertsConfig, chosen: Tensor, tokens: float) -> Tensor:
    """Return f [layers, E] of each layer, or of the whole model if the config takes the layers together.

    chosen [layers, E]: tokens of each expert, of all layers.
    """
    shares = (chosen / max(tokens, 1.0)).float()
    return shares if config.balance_of == "layer" else shares.mean(0, keepdim=True).expand_as(shares)


def by_layer(part: Batch, layers: Sequence[int], chosen: int, every: int) -> Any:
    """Return the recorded experts [N, layers, k] of the layers with these numbers, of a model with `every` layers.

    An engine may have recorded layers without experts, too.
    """
    column = np.asarray(part[COLUMN])
    if column.ndim == 2 and column.shape[1] == len(layers) * chosen:
        return column.reshape(-1, len(layers), chosen)
    if column.ndim == 2 and column.shape[1] == every * chosen:
        return column.reshape(-1, every, chosen)[:, list(layers)]
    raise WhetError(
        f"the column {COLUMN!r} has shape {list(column.shape)}, wanted [tokens, {len(layers) * chosen}]: {chosen} "
        f"experts of each of {len(layers)} layers; does the generator run the same model?"
    )


def refuse_unrecorded() -> None:
    """Raise `WhetError` because a replay has nothing to replay."""
    raise WhetError(
        f"backend.experts.replay: the batch has no column {COLUMN!r}; a generator that records the experts must have "
        "sampled it"
    )


def recorded_tokens(batch: Batch, ids: Any, experts: int) -> Any:
    """Return the tokens of each expert [layers, E] that a replay will have. None: the router will choose some of them.

    ids [N, layers, k]: the recorded experts.
    """
    used, lengths = used_lengths(batch), np.asarray(batch["lengths"])
    position = np.arange(batch.tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    ids = ids[position < np.repeat(used, lengths)]
    if not (ids >= 0).all():
        return None
    return np.stack([np.bincount(ids[:, i].ravel(), minlength=experts) for i in range(ids.shape[1])])
