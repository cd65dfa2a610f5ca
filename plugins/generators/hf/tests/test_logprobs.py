"""Logprobs are those of a full forward, whatever the model's shape and the batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whet_hf.fused import FusedDecoder
from whet_hf.layers import compiled, run_layers
from whet_hf.plain import PlainDecoder

BAR = 1e-5
"""Nats; the contract asks for 1e-4."""


@pytest.mark.parametrize("shape", ["qwen3", "qwen3-untied-head-24", "qwen2", "llama", "llama-gqa-untied"])
@pytest.mark.parametrize("fused", [True, False])
def test_logprobs_are_those_of_a_full_forward(load: Any, requests_of: Any, shape: str, fused: bool) -> None:
    decoding = load(shape, fused=fused)
    assert isinstance(decoding.decoder, FusedDecoder if fused else PlainDecoder)
    requests = requests_of(30)
    for request, completion in zip(requests, decoding.decode(requests), strict=True):
        assert decoding.gap(request, completion) < BAR


@pytest.mark.parametrize("fused", [True, False])
def test_they_still_are_after_new_weights(load: Any, requests_of: Any, fused: bool) -> None:
    decoding, requests = load("qwen3", fused=fused), requests_of(12)
    before = decoding.decode(requests)
    draw = torch.Generator().manual_seed(1)
    for parameter in decoding.model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    decoding.decoder.refresh()
    after = decoding.decode(requests)
    assert any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(before, after, strict=True))
    for request, completion in zip(requests, after, strict=True):
        assert decoding.gap(request, completion) < BAR


def test_both_decoders_give_the_same_completions(load: Any, requests_of: Any) -> None:
    requests = requests_of(24)
    for one, other in zip(load("llama").decode(requests), load("llama", fused=False).decode(requests), strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=BAR)


def test_without_torchscript_the_layers_run_as_python(load: Any, requests_of: Any, monkeypatch: Any) -> None:
    requests = requests_of(12)
    expected = load("qwen3").decode(requests)
    monkeypatch.delattr(torch.jit, "script")
    decoding = load("qwen3")
    assert decoding.decoder.run_layers is run_layers
    for one, other in zip(decoding.decode(requests), expected, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=BAR)


def test_torchscript_knows_the_layers() -> None:
    assert compiled() is not run_layers, "only a release of torch without TorchScript runs them as Python"


def test_the_order_and_company_of_requests_change_nothing(decoding: Any, requests_of: Any) -> None:
    requests = requests_of(24)
    together = decoding.decode(requests)
    for part in (requests[::-1], requests[5:9], requests[::5], requests[7:8]):
        for completion, request in zip(decoding.decode(part), part, strict=True):
            expected = together[requests.index(request)]
            assert np.array_equal(completion.tokens, expected.tokens)
            np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=BAR)


def test_the_same_batch_gives_the_same_bits(decoding: Any, requests_of: Any) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for one, other in zip(
            decoding.decode(requests_of(24)), decoding.decode(requests_of(24)[::-1])[::-1], strict=True
        ):
            assert one.tokens.tobytes() == other.tokens.tobytes()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()
    finally:
        torch.set_num_threads(threads)


def test_finished_rows_leave_and_the_others_go_on(decoding: Any, requests_of: Any, monkeypatch: Any) -> None:
    requests = requests_of(40, temperature=1.0)
    kept: list[int] = []
    begin = decoding.decoder.begin

    def watched(*args: Any) -> Any:
        session = begin(*args)
        keep: Callable[[torch.Tensor], None] = session.keep
        session.keep = lambda rows: (kept.append(len(rows)), keep(rows))
        return session

    monkeypatch.setattr(decoding.decoder, "begin", watched)
    completions = decoding.decode(requests)
    assert kept == sorted(kept, reverse=True)
    assert len(kept) >= 3
    assert [len(c.tokens) for c in completions] == [r.sampling.max_tokens for r in requests]
    for request, completion in zip(requests, completions, strict=True):
        assert decoding.gap(request, completion) < BAR


def test_long_prompts_are_computed_in_chunks(decoding: Any, requests_of: Any, monkeypatch: Any) -> None:
    requests = requests_of(24)
    expected = decoding.decode(requests)
    monkeypatch.setattr("whet_hf.fused.PREFILL_TOKENS", 40)
    monkeypatch.setattr("whet_hf.fused.PREFILL_PADDING", 3)
    for one, other in zip(decoding.decode(requests), expected, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=BAR)


def test_more_draws_than_a_block_and_more_positions_than_a_table(load: Any, requests_of: Any) -> None:
    decoding = load("qwen2")
    (request,) = requests_of(1, max_tokens=200)
    (completion,) = decoding.decode([request])
    assert len(completion.tokens) == 200
    assert decoding.gap(request, completion) < BAR


def test_in_bfloat16_they_are_close(load: Any, requests_of: Any) -> None:
    for fused in (True, False):
        decoding, requests = load("qwen3", fused=fused, dtype="bfloat16"), requests_of(12)
        for request, completion in zip(requests, decoding.decode(requests), strict=True):
            assert completion.logprobs.dtype == np.float32
            assert decoding.gap(request, completion) < 0.1
