"""Tokens are drawn with their probabilities, from a hash of seed and step alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data.records import Sampling
from whet_generation.sampling import Sampler, uniforms, uniforms_at

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], seeds: Sequence[int] | None = None, step: int = 0):  # type: ignore[no-untyped-def]
    return Sampler(samplings, list(seeds or range(len(samplings))), CPU).draw(logits, step)


def counts(logits: torch.Tensor, sampling: Sampling, draws: int = 20_000) -> np.ndarray:  # type: ignore[type-arg]
    tokens, _ = draw(logits.expand(draws, -1), [sampling] * draws)
    return np.bincount(tokens.numpy(), minlength=len(logits))


def chi_square(found: np.ndarray, probabilities: np.ndarray) -> float:  # type: ignore[type-arg]
    """Chi-square per degree of freedom; about 1 when the distribution is right."""
    assert (found[probabilities == 0] == 0).all(), "a token of probability 0 was drawn"
    expected = probabilities[probabilities > 0] * found.sum()
    return float((((found[probabilities > 0] - expected) ** 2) / expected).sum() / (len(expected) - 1))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_come_with_their_probabilities(temperature: float) -> None:
    logits = torch.linspace(-2, 2, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    probabilities = torch.softmax(logits.double() / temperature, -1).numpy()
    assert 0.4 < chi_square(counts(logits, Sampling(temperature=temperature)), probabilities) < 1.8


def test_draws_of_one_seed_at_many_steps_are_uniform_and_so_are_those_of_many_seeds() -> None:
    for sample in (
        uniforms(np.array([7], np.uint64), 0, 50_000)[0],
        uniforms(np.arange(50_000, dtype=np.uint64), 3, 1),
    ):
        found = np.bincount((sample.ravel() * 100).astype(int), minlength=100)
        assert 0.6 < chi_square(found, np.full(100, 0.01)) < 1.5
    grid = uniforms(np.arange(2000, dtype=np.uint64), 0, 50)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02


def test_a_draw_does_not_depend_on_how_many_are_made_at_once() -> None:
    seeds = np.array([1, 2**63, 2**64 - 1], np.uint64)
    whole = uniforms(seeds, 0, 200)
    assert np.array_equal(whole[:, 130:140], uniforms(seeds, 130, 10))
    assert np.array_equal(whole[1:2], uniforms(seeds[1:2], 0, 200))
    assert ((whole >= 0) & (whole < 1)).all()


def test_rows_at_steps_of_their_own_draw_what_they_draw_together() -> None:
    seeds, steps = np.array([1, 2**63, 2**64 - 1, 5], np.uint64), np.array([0, 3, 64, 199])
    whole = uniforms(seeds, 0, 200)
    assert np.array_equal(uniforms_at(seeds, steps), whole[np.arange(4), steps])
    logits, samplings = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)), [Sampling()] * 4
    tokens, logprobs = Sampler(samplings, seeds.tolist(), CPU).draw(logits, steps)
    for row, step in enumerate(steps):
        alone, logprob = Sampler(samplings[:1], [int(seeds[row])], CPU).draw(logits[row : row + 1], int(step))
        assert (tokens[row], logprobs[row]) == (alone[0], logprob[0])


def test_a_row_draws_the_same_in_any_company() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    samplings = [Sampling(), Sampling(temperature=0.3), Sampling(temperature=0), Sampling(top_k=5), Sampling(top_p=0.5)]
    samplings.append(Sampling(top_k=9, top_p=0.7, temperature=0.8))
    seeds = [10, 11, 12, 13, 14, 15]
    tokens, logprobs = draw(logits, samplings, seeds, step=70)
    for row in range(6):
        token, logprob = draw(logits[row : row + 1], samplings[row : row + 1], seeds[row : row + 1], step=70)
        assert int(token) == int(tokens[row])
        assert float(logprob) == float(logprobs[row])


def test_rows_that_are_kept_go_on_with_their_own_draws() -> None:
    logits, samplings = torch.zeros(5, 1000), [Sampling()] * 5
    sampler = Sampler(samplings, range(5), CPU)
    for step in (0, 1):
        sampler.draw(logits, step)
    rows = torch.tensor([4, 1, 3])
    sampler.keep(rows)
    for step in (2, 63, 64, 65):
        kept, _ = sampler.draw(logits[:3], step)
        assert torch.equal(kept, draw(logits, samplings, range(5), step)[0][rows])


def test_temperature_0_takes_the_likeliest_with_its_logprob_at_1() -> None:
    logits = torch.randn(8, 30)
    tokens, logprobs = draw(logits, [Sampling(temperature=0)] * 8)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


def test_no_more_tokens_are_the_likeliest_than_the_vocabulary_has() -> None:
    sampler, logits = Sampler([Sampling()] * 2, range(2), CPU), torch.randn(2, 5)
    tokens, logprobs = sampler.likeliest(logits, 20)
    assert torch.equal(tokens, logits.argsort(-1, descending=True))
    assert logprobs.shape == (2, 5)


def test_top_k_and_top_p_restrict_what_is_drawn_and_not_its_logprob() -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    cases = {
        Sampling(top_k=2): [0, 0.4, 0, 0.25, 0],
        Sampling(top_p=0.6): [0, 0.4, 0, 0.25, 0],
        Sampling(top_p=0.7): [0, 0.4, 0, 0.25, 0.2],
        Sampling(top_p=0.01): [0, 1, 0, 0, 0],
        Sampling(top_k=3, top_p=0.75): [0, 0.4, 0, 0.25, 0],  # 0.65 of the 0.85 that top-k leaves are enough
        Sampling(top_k=100, top_p=1.0): probabilities.tolist(),
    }
    for sampling, wanted in cases.items():
        found = counts(probabilities.log(), sampling, 4000)
        weights = np.array(wanted) / sum(wanted)
        assert np.array_equal(found > 0, weights > 0), sampling
        assert np.abs(found / found.sum() - weights).max() < 0.03, sampling
        tokens, logprobs = draw(probabilities.log().expand(50, -1), [sampling] * 50)
        torch.testing.assert_close(logprobs, probabilities.log()[tokens])


def test_equal_logits_at_the_edge_of_top_k_give_exactly_k() -> None:
    assert (counts(torch.zeros(10), Sampling(top_k=4), 500) > 0).sum() == 4


def test_unlikely_tokens_of_a_large_vocabulary_keep_their_share() -> None:
    # In float32 sums, 100,000 tokens of 1e-9 after a likely one would vanish.
    logits = torch.full((100_001,), np.log(5e-6).item())
    logits[0] = np.log(0.5)
    found = counts(logits, Sampling(), 400)
    assert 140 < found[1:].sum() < 260
    assert (found[1:] > 0).sum() > 0.9 * found[1:].sum()


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(1, 12))
def test_a_token_of_probability_0_is_never_drawn(data: st.DataObject, size: int) -> None:
    values = st.sampled_from([-np.inf, -200.0, -1.0, 0.0, 3.0, 80.0])
    logits = torch.tensor(data.draw(st.lists(values, min_size=size, max_size=size).filter(lambda v: max(v) > -np.inf)))
    seeds = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=4, max_size=4))
    tokens, logprobs = draw(logits.expand(4, -1), [Sampling()] * 4, seeds)
    assert ((tokens >= 0) & (tokens < size)).all()
    assert torch.isfinite(logits[tokens]).all()
    assert torch.isfinite(logprobs).all()


def test_the_largest_and_smallest_draws_stay_in_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[-np.inf, 0.0, -np.inf, 1.0, -np.inf]]).expand(2, -1)
    sampler = Sampler([Sampling()] * 2, [0, 1], CPU)
    edges = torch.tensor([[0.0], [1 - 2.0**-52]], dtype=torch.float64)
    monkeypatch.setattr(sampler, "_draw", lambda step: edges)
    assert sampler.draw(logits, 0)[0].tolist() == [1, 3]
