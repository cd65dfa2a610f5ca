"""Models whose layers keep a state of all tokens (linear attention, Mamba) are sampled rightly, or refused by name."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whet.data.records import Completion, Request, Sampling
from whet.errors import WhetError
from whet.interfaces.workers import WorkerRank
from whet_hf.loading import load_model
from whet_hf.plain import PlainDecoder
from whet_hf.worker import Worker, cache_bytes_per_token

BAR = 1e-4
"""Nats, as the contract asks; states round more than attention does."""
SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "num_local_experts": 0, "shared_intermediate_size": 48,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_dt_rank": 4},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
}  # fmt: skip
GEMMA = {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": 16, "vocab_size_per_layer_input": 384,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.fixture
def make(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., Path]:
    """Write a random model of a family of `transformers` to a folder."""

    def folder(family: str, **config: Any) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **config}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / family)
        tiny_tokenizer.save_pretrained(tmp_path / family)
        return tmp_path / family

    return folder


def make_worker(folder: Path, **options: Any) -> Worker:
    settings = {"dtype": "float32", "trust_remote_code": False, "max_batch": 64, "cache_bytes": 1 << 30, "fused": True}
    settings |= {"prefix_caching": False, "scratch": str(folder.parent / "scratch"), **options}
    return Worker(WorkerRank("generator", 0, 1), path=str(folder), **settings)


def ask(worker: Worker, requests: list[Request]) -> dict[str, Completion | str]:
    """Return the completion of each request, or why it was refused."""

    async def answers() -> list[Any]:
        return [one async for outcomes in worker.generate(requests) for one in outcomes]

    return dict(one if isinstance(one, tuple) else (one.id, one) for one in asyncio.run(answers()))


def gap(worker: Worker, request: Request, one: Completion) -> float:
    """Return the largest difference to the logprobs of a full forward, in nats."""
    sequence = torch.from_numpy(np.concatenate([request.tokens, one.tokens]))
    with torch.no_grad():
        logprobs = worker._model(input_ids=sequence[None], use_cache=False).logits[0].double().log_softmax(-1)
    begin = len(request.tokens)
    expected = logprobs[begin - 1 : -1].gather(1, sequence[begin:, None])[:, 0]
    return float((expected - torch.from_numpy(one.logprobs)).abs().max())


@pytest.mark.parametrize("family", STATES)
def test_logprobs_of_a_model_with_states_are_those_of_a_full_forward(make: Any, family: str) -> None:
    worker = make_worker(make(family, **STATES[family]))
    assert isinstance(worker._decoder, PlainDecoder)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 384, length) for length in (1, 3, 17, 17, 33)]
    requests = [
        Request(f"{i}-{j}", prompt, Sampling(max_tokens=4 + 4 * i), 10 * i + j)
        for i, prompt in enumerate(prompts)
        for j in range(2)
    ]
    together = ask(worker, requests)
    for request in requests:
        one = together[request.id]
        assert isinstance(one, Completion)
        assert gap(worker, request, one) < BAR
    alone = ask(worker, requests[:1])["0-0"]
    assert isinstance(alone, Completion)
    assert np.array_equal(alone.tokens, together["0-0"].tokens)  # type: ignore[union-attr]
    worker.close()


def test_an_error_of_a_state_that_adds_up_is_found(make: Any) -> None:
    # transformers bounds the time step in a full pass, and not in a step.
    config = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}
    folder = make("nemotron_h", layers_block_type=["mamba", "attention"], **config)
    with pytest.raises(WhetError, match=r"NemotronHForCausalLM gives other logits with a cache .* another generator"):
        make_worker(folder)


def test_a_model_with_a_cache_of_its_own_is_refused_by_name(make: Any) -> None:
    config = {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4, "head_dim": 8}
    folder = make("minimax", layer_types=["linear_attention", "full_attention"], **config)
    with pytest.raises(WhetError, match=r"MiniMaxForCausalLM cannot be decoded .* use another generator .* vllm"):
        make_worker(folder)


def test_states_count_as_memory_of_a_row(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # By hand: keys and values of the second layer, 2 heads of 8 floats; in the first layer a convolution of 4 columns
    # over 2 * 16 + 16 channels, and a state of 2 heads of 8 x 8.
    token, row = 2 * 2 * 8 * 4, 4 * (48 * 4 + 2 * 8 * 8)
    folder = make("qwen3_5_text", head_dim=8, **LINEAR)
    worker = make_worker(folder, cache_bytes=3 * (30 * token + row))
    assert isinstance(worker._decoder, PlainDecoder)
    assert worker._decoder.cache_bytes == (token, row)
    seen, decode = [], worker._decode
    monkeypatch.setattr(worker, "_decode", lambda jobs: (seen.append(len(jobs)), decode(jobs))[1])
    ask(worker, [Request(str(i), np.arange(3, 13), Sampling(max_tokens=20), i) for i in range(7)])
    assert seen == [3, 3, 1]
    worker.close()


def test_a_token_of_gemma_4_is_counted_with_layers_of_two_sizes(make: Any) -> None:
    folder = make("gemma4_text", **GEMMA)
    worker = make_worker(folder, prefix_caching=True)
    assert isinstance(worker._decoder, PlainDecoder)
    assert worker._decoder.cache_bytes == (2 * 2 * (8 + 16) * 4, 0)
    assert cache_bytes_per_token(load_model(str(folder), "float32", "cpu", False)) == 2 * 2 * (8 + 16) * 4
    worker.close()


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt2", {"max_position_embeddings": 32}),
        ("phi3", {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
        ("llama", {"max_position_embeddings": 32, "rope_parameters": DYNAMIC}),
    ],
)
def test_a_row_that_has_ended_takes_no_position_that_a_model_lacks_or_that_changes_all_rows(
    make: Any, family: str, config: dict[str, Any]
) -> None:
    worker = make_worker(make(family, **config))
    assert isinstance(worker._decoder, PlainDecoder)
    requests = [Request("long", np.arange(3, 33), Sampling(max_tokens=2), 0)]
    requests += [Request(str(i), np.arange(3, 8 + i), Sampling(max_tokens=18), i) for i in range(7)]
    found = ask(worker, requests)
    for request in requests:
        one = found[request.id]
        assert isinstance(one, Completion)
        assert len(one.tokens) == request.sampling.max_tokens
        assert gap(worker, request, one) < BAR
    worker.close()


def test_a_request_whose_positions_would_depend_on_its_batch_is_refused(make: Any) -> None:
    config = {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}
    worker = make_worker(make("phi3", **config))
    found = ask(worker, [Request(str(n), np.arange(3, 31), Sampling(max_tokens=n), 0) for n in (4, 5)])
    assert isinstance(found["4"], Completion)
    assert isinstance(found["5"], str)
    assert "request 5 may take 33 tokens" in found["5"]
    assert "(longrope or dynamic)" in found["5"]
    assert "set rollout.max_context to 32" in found["5"]
    worker.close()


def test_dynamic_rotary_embeddings_end_where_they_would_depend_on_the_batch(make: Any) -> None:
    worker = make_worker(make("llama", max_position_embeddings=32, rope_parameters=DYNAMIC))
    found = ask(worker, [Request("a", np.arange(3, 31), Sampling(max_tokens=9), 0)])["a"]
    assert isinstance(found, Completion)
    assert len(found.tokens) == 4
    worker.close()
