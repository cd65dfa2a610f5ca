"""Keys and values of ended sequences: a next turn computes only what is new, with the numbers of a full forward."""

import numpy as np
import pytest
import torch
from attrs import evolve

from whet_hf.prefixes import BLOCK, Prefixes

ROOM = 1 << 26


class Counting:
    """Counts the tokens that a decoder computes."""

    def __init__(self, decoder, monkeypatch):
        self.tokens, self._run = 0, decoder.run
        monkeypatch.setattr(decoder, "run", self)

    def __call__(self, tokens, positions, cache):
        self.tokens += len(tokens)
        return self._run(tokens, positions, cache)


def next_turn(requests, completions, seed=0, most=9):
    """Return requests that go on after their completions, with a few tokens of an environment."""
    rng = np.random.default_rng(seed)
    answers = [rng.integers(3, 384, rng.integers(1, most)) for _ in requests]
    return [
        evolve(r, id=f"{r.id}+", tokens=np.concatenate([r.tokens, c.tokens, answer]), seed=r.seed + 1)
        for r, c, answer in zip(requests, completions, answers, strict=True)
    ]


@pytest.mark.parametrize("shape", ["qwen3", "qwen3-untied-head-24", "qwen2", "llama", "llama-gqa-untied"])
def test_turns_that_go_on_have_the_logprobs_of_a_full_forward_and_compute_little(load, requests_of, shape, monkeypatch):
    decoding = load(shape, cache_bytes=ROOM)
    counted = Counting(decoding.decoder, monkeypatch)
    requests, computed = requests_of(24, group=2), []
    for turn in range(5):
        counted.tokens = 0
        completions = decoding.decode(requests)
        drawn = sum(len(completion.tokens) for completion in completions)
        computed.append(counted.tokens - drawn)
        for request, completion in zip(requests, completions, strict=True):
            assert decoding.gap(request, completion) < 1e-4
        requests = next_turn(requests, completions, turn)
        if turn == 2:  # others come between
            decoding.decode(requests_of(7, seed=5))
    whole = sum(len(request.tokens) for request in requests)
    assert computed[4] < 0.5 * whole
    assert computed[1] > computed[3]  # it begins to keep when a first prompt goes on


def test_turns_of_one_prompt_share_what_is_kept_and_others_stand_beside_them(load, requests_of):
    decoding = load("qwen3", cache_bytes=ROOM)
    requests = requests_of(6, group=1, max_tokens=12)
    for turn in range(3):
        completions = decoding.decode(requests)
        requests = next_turn(requests, completions, turn, most=2)
    forks = [evolve(r, id=f"{r.id}-{i}", seed=r.seed + i) for r in requests for i in range(3)]
    mixed = [*forks, *requests_of(9, seed=3)]
    for request, completion in zip(mixed, decoding.decode(mixed), strict=True):
        assert decoding.gap(request, completion) < 1e-4


def test_chunks_hold_a_limited_number_of_keys(load, requests_of, monkeypatch):
    monkeypatch.setattr("whet_hf.fused.PREFILL_COLUMNS", 100)
    decoding, seen = load("qwen3", cache_bytes=ROOM), []
    requests = requests_of(8, group=1)
    for turn in range(4):
        requests = next_turn(requests, decoding.decode(requests), turn)
    run = decoding.decoder.run
    monkeypatch.setattr(decoding.decoder, "run", lambda t, p, cache: seen.append(cache) or run(t, p, cache))
    for request, completion in zip(requests, decoding.decode(requests), strict=True):
        assert decoding.gap(request, completion) < 1e-4
    keys = [len(c.firsts) * (c.past + c.width) for c in seen if c.firsts is not None and len(c.firsts) > 1]
    assert max(keys, default=0) <= 100
    assert any(cache.past for cache in seen)


def test_nothing_is_kept_of_old_weights(load, requests_of, monkeypatch):
    decoding = load("qwen3", cache_bytes=ROOM)
    requests = requests_of(6, group=1)
    for turn in range(3):
        requests = next_turn(requests, decoding.decode(requests), turn)
    assert decoding.decoder.prefixes.find(requests[0].tokens)[1] > 0
    with torch.no_grad():
        for parameter in decoding.model.parameters():
            parameter.mul_(1.1)
    decoding.decoder.refresh()
    assert decoding.decoder.prefixes.find(requests[0].tokens) == (None, 0)
    for request, completion in zip(requests, decoding.decode(requests), strict=True):
        assert decoding.gap(request, completion) < 1e-4


def test_single_turns_copy_nothing(load, requests_of):
    decoding = load("qwen3", cache_bytes=ROOM)
    for seed in range(3):
        decoding.decode(requests_of(12, seed=seed))
    assert decoding.decoder.prefixes.clear() == 0


def test_what_is_kept_and_what_runs_stay_within_the_limit(load, requests_of):
    decoding = load("qwen3", cache_bytes=ROOM)
    requests = requests_of(12, group=1)
    for turn in range(4):
        requests = next_turn(requests, decoding.decode(requests), turn)
    kept = decoding.decoder.prefixes._size
    limit = decoding.decoder._running() + kept // 2
    small = load("qwen3", cache_bytes=limit)
    requests = requests_of(12, group=1)
    for turn in range(4):
        completions = small.decode(requests)
        assert small.decoder._running() + small.decoder.prefixes._size <= limit
        for request, completion in zip(requests, completions, strict=True):
            assert small.gap(request, completion) < 1e-4
        requests = next_turn(requests, completions, turn)
    assert 0 < small.decoder.prefixes._size < kept
    assert small.decoder.free() >= kept // 4
    assert small.decoder.prefixes._size == 0


def test_a_sequence_takes_the_place_of_the_one_that_it_continues():
    prefixes, first = Prefixes(10_000), np.arange(20)
    cache = torch.randn(1, 2, 1, 20, 4)
    prefixes.keep(first, 10, cache, 0)
    # It goes on after token 10: keys and values are wanted from now on.
    assert prefixes.find(np.arange(15)) == (None, 0)
    prefixes.keep(first, 10, cache, 0)
    found, length = prefixes.find(np.arange(40))
    assert torch.equal(found, cache)
    assert length == 20
    assert prefixes.find(np.arange(20))[1] == 19  # the last token is computed: its logits are wanted
    assert prefixes.find(np.append(np.arange(13), [99, 98]))[1] == 13
    assert prefixes.find(np.append(np.arange(BLOCK - 1), [99, 98])) == (None, 0)
    prefixes.keep(np.arange(30), 25, cache, 0)
    assert len(prefixes._kept) == 1
    assert prefixes.find(np.arange(40))[1] == 30
    assert prefixes.clear() == cache.nbytes
    assert not prefixes._at
    prefixes.keep(first, 10, cache, 0)  # it began before all was forgotten
    assert prefixes.find(np.arange(40)) == (None, 0)


def test_the_oldest_is_dropped_first():
    one = torch.zeros(1, 2, 1, 16, 4)
    prefixes = Prefixes(2 * one.nbytes)
    sequences = [np.arange(16) + 100 * n for n in range(4)]
    prefixes.keep(sequences[0], 4, one, 0)
    prefixes.find(sequences[0])
    for sequence in sequences:
        prefixes.keep(sequence, 4, one, 0)
    assert [prefixes.find(np.append(s, 1))[1] for s in sequences] == [0, 0, 16, 16]
    prefixes.leave(one.nbytes)
    assert [prefixes.find(np.append(s, 1))[1] for s in sequences] == [0, 0, 0, 16]
    prefixes.keep(np.arange(99), 4, torch.zeros(9, 2, 9, 99, 9), 0)
    assert prefixes.find(np.arange(99)) == (None, 0)
