"""Draw tokens that depend only on the request's own seed and probabilities, not on the device or the batch.

u = hash(seed, position) in [0, 1)        the token at which the cumulative probability passes u
"""

import torch

_ADDED, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014."""


def draw(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    *, restricted: bool,
) -> torch.Tensor:  # fmt: skip
    """Draw a token for each row: probs [B, V], seeds and positions [B] int64, top_k and top_p [B] -> [B] int64.

    restricted: whether top_k or top_p of any row leaves tokens out.
    """
    kept = likeliest(probs, top_k, top_p) if restricted else probs
    cumulated = kept.double().cumsum(-1)
    passed = uniform(seeds, positions)[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, passed, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def likeliest(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the probabilities with 0 for tokens outside the top_k likeliest or outside the nucleus of top_p."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    rank = torch.arange(probs.shape[-1], device=probs.device)
    left_out = (rank >= top_k[:, None]) | ((before >= top_p[:, None]) & (rank > 0))
    return torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(left_out, 0.0))


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each pair of seed and position. [B], [B] -> [B] float64."""
    mixed = _mix(_mix(seeds) + positions.to(torch.int64) * _signed(_ADDED))
    return _shifted(mixed, 11).double() * 2.0**-53


def _mix(number: torch.Tensor) -> torch.Tensor:
    number = number.to(torch.int64) + _signed(_ADDED)
    number = (number ^ _shifted(number, 30)) * _signed(_FIRST)
    number = (number ^ _shifted(number, 27)) * _signed(_SECOND)
    return number ^ _shifted(number, 31)


def _shifted(number: torch.Tensor, bits: int) -> torch.Tensor:
    """Return an unsigned right shift. torch's 64-bit integers are signed."""
    return (number >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
