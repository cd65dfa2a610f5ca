"""Sampling, row by row: the tokens of a request do not depend on the other requests of its batch.

Draw t of a request is a hash of (its seed, t). A token is found by inverting the cumulative distribution in vocabulary
order, so a request's tokens are a function of its own logits alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.data.records import Sampling

BLOCK = 64
"""Number of steps whose draws are made at a time."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms_at(seeds: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one draw of each seed: draw `steps[i]` of seed i, as in `uniforms`. seeds, steps [B] -> [B]."""
    return _unit(_mix(_mix(seeds) + (steps.astype(np.uint64) + np.uint64(1)) * _GOLDEN))


def uniforms(seeds: NDArray[np.uint64], first: int, count: int) -> NDArray[np.float64]:
    """Return draws first .. first + count of each seed. seeds [B] -> [B, count] in [0, 1 - 2^-52].

    SplitMix64 (Steele, Lea and Flood 2014), counting from the hashed seed.
    """
    step = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GOLDEN
    return _unit(_mix(_mix(seeds)[:, None] + step))


def _unit(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    # 52 bits: the largest draw times a total is still below the total after rounding.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Draws one token for every row of a batch. The batch shrinks when rows are dropped."""

    def __init__(self, samplings: Sequence[Sampling], seeds: Sequence[int], device: torch.device) -> None:
        self._seeds = np.array([seed & (2**64 - 1) for seed in seeds], np.uint64)
        self._device = device
        temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device)
        self._greedy = temperature == 0
        self._temperature = torch.where(self._greedy, 1.0, temperature)[:, None]
        self._top_k = torch.tensor([s.top_k for s in samplings], device=device)[:, None]
        self._top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float32, device=device)[:, None]
        self._any_scaled = any(s.temperature not in (0.0, 1.0) for s in samplings)
        self._any_greedy = any(s.temperature == 0 for s in samplings)
        self._any_truncated = any(s.top_k > 0 or s.top_p < 1 for s in samplings)
        self._draws = torch.empty(0)
        self._block = -1

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self._seeds = self._seeds[rows.cpu().numpy()]
        self._greedy, self._temperature = self._greedy[rows], self._temperature[rows]
        self._top_k, self._top_p = self._top_k[rows], self._top_p[rows]
        self._draws = self._draws[rows]

    def draw(self, logits: Tensor, step: int | NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Draw a token for each row. logits [B, V] -> tokens [B], logprobs [B] float32.

        step: the number of tokens that all rows have drawn before, or that of each row [B].
        Logprobs are of log_softmax(logits / temperature) over the whole vocabulary; at temperature 0 they are of
        log_softmax(logits). If the logits are not finite, the logprob is not finite either.
        """
        logits = logits.float()
        if self._any_scaled:
            logits = logits / self._temperature
        shifted = logits - logits.amax(-1, keepdim=True)
        weights = shifted.exp()
        drawn = self._truncate(weights) if self._any_truncated else weights
        # Sums over a large vocabulary need float64: after a likely token, unlikely ones must not vanish in rounding.
        cumulative = drawn.cumsum(-1, dtype=torch.float64)
        point = self._draw(step) * cumulative[:, -1:]
        # The first sum above the point. It exists, as the point is below the total; its token has a weight above 0.
        tokens = torch.searchsorted(cumulative, point, right=True).clamp_(max=logits.shape[-1] - 1)
        if self._any_greedy:
            tokens = torch.where(self._greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
        total = weights.sum(-1, keepdim=True, dtype=torch.float64) if self._any_truncated else cumulative[:, -1:]
        logprobs = (shifted.gather(1, tokens) - total.log()).float()
        return tokens[:, 0], logprobs[:, 0]

    def likeliest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens of each row, [B, count] or the whole vocabulary, and their logprobs, which are of
        the same distribution as those of `draw`. logits [B, V].
        """
        logprobs, tokens = (logits.float() / self._temperature).log_softmax(-1).topk(min(count, logits.shape[-1]))
        return tokens, logprobs

    def _draw(self, step: int | NDArray[np.int64]) -> Tensor:
        if not isinstance(step, int):
            return torch.from_numpy(uniforms_at(self._seeds, step)).to(self._device)[:, None]
        if step // BLOCK != self._block:
            self._block = step // BLOCK
            self._draws = torch.from_numpy(uniforms(self._seeds, self._block * BLOCK, BLOCK)).to(self._device)
        return self._draws[:, step % BLOCK, None]

    def _truncate(self, weights: Tensor) -> Tensor:
        """Return the weights with 0 for tokens outside top-k, then outside top-p. The likeliest token always stays."""
        ordered, order = weights.sort(stable=True, dim=-1, descending=True)
        rank = torch.arange(weights.shape[-1], device=weights.device)
        ordered = ordered.where((self._top_k == 0) | (rank < self._top_k), 0.0)
        probabilities = ordered.double() / ordered.sum(-1, keepdim=True, dtype=torch.float64)
        before = probabilities.cumsum(-1) - probabilities
        kept = ((before < self._top_p) | (self._top_p >= 1)) & (ordered > 0)
        kept[:, 0] = True
        return weights * torch.zeros_like(kept).scatter(1, order, kept)
