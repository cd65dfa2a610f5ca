"""Tokens are drawn with their probabilities, by seed and position alone, from what top-k and top-p leave."""

import numpy as np
import pytest
import torch

from whet_sglang.drawing import draw, likeliest, uniform

PROBS = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])


def drawn(count: int, top_k: int = 5, top_p: float = 1.0, seed: int = 0) -> torch.Tensor:
    seeds, positions = torch.full((count,), seed), torch.arange(count)
    ks, ps = torch.full((count,), top_k), torch.full((count,), top_p)
    return draw(PROBS.expand(count, -1), seeds, positions, ks, ps, restricted=top_k < 5 or top_p < 1)


def shares(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=5) / len(tokens)


def test_tokens_come_with_their_probabilities() -> None:
    found = shares(drawn(40_000))
    assert found[1] == 0
    assert (found - PROBS).abs().max() < 5 * (0.25 / 40_000) ** 0.5


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [
        (2, 1.0, {0, 2}), (1, 1.0, {0}), (5, 0.6, {0, 2}), (5, 0.5, {0}), (5, 1e-9, {0}),
        (2, 0.6, {0, 2}),  # top-p is of the whole vocabulary: of the two alone, 0.5 / 0.8 would be enough
    ],
)  # fmt: skip
def test_what_top_k_and_top_p_leave_out_never_comes(top_k: int, top_p: float, left: set[int]) -> None:
    tokens = drawn(2_000, top_k, top_p)
    assert set(tokens.tolist()) == left
    kept = PROBS * torch.tensor([float(token in left) for token in range(5)])
    assert (shares(tokens) - kept / kept.sum()).abs().max() < 0.06


def test_rows_have_limits_of_their_own() -> None:
    found = likeliest(PROBS.expand(2, -1), torch.tensor([1, 5]), torch.tensor([1.0, 1.0]))
    assert found.tolist() == [[0.5, 0, 0, 0, 0], PROBS.tolist()]


def test_a_draw_depends_on_its_seed_and_position_and_on_no_other_row() -> None:
    seeds, positions = torch.tensor([3, 2**62, 3, 9]), torch.tensor([7, 7, 8, 7])
    together = uniform(seeds, positions)
    assert [uniform(seeds[i : i + 1], positions[i : i + 1]).item() for i in range(4)] == together.tolist()
    assert len(set(together.tolist())) == 4


def test_numbers_of_neighbouring_seeds_and_positions_are_spread_and_unrelated() -> None:
    grid = uniform(torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)).reshape(200, 200).numpy()
    assert 0 <= grid.min() < grid.max() < 1
    assert np.abs(np.histogram(grid, 20, (0, 1))[0] / grid.size - 0.05).max() < 0.005
    for one, other in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.025
