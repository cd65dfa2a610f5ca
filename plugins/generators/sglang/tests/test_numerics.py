"""Logprobs of sampled tokens are those of a full forward in `transformers`, whatever weights were synced before."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.data.records import Request, Sampling
from whet.interfaces.weights import TransferSpec
from whet_sglang.arguments import ENGINE
from whet_sglang.config import SglangConfig
from whet_sglang.generator import SglangGenerator
from whet_testing.reference import Reference
from whet_testing.role_context import make_context
from whet_testing.served import TOLERANCE, gap
from whet_weights import transfer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not ENGINE.is_here, reason="SGLang is not installed; `nox -s 'engines(sglang)'` has it"),
]


def largest_gap(runner: asyncio.Runner, generator: SglangGenerator, model: Reference, temperature: float) -> float:
    """Find the largest difference of sampled logprobs to a full forward."""
    prompts = [np.random.default_rng(n).integers(3, 300, 4 + 5 * n) for n in range(6)]
    asked = [Request(str(n), p, Sampling(24, temperature=temperature), n) for n, p in enumerate(prompts)]

    async def together() -> Any:
        return await asyncio.gather(*map(generator.generate, asked))

    found = runner.run(together())
    return max(gap(model, r, c, temperature or 1.0) for r, c in zip(asked, found, strict=True))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_before_after_and_after_twenty_weight_syncs(tiny_models: Any, tmp_path: Path, family: str, tied: bool) -> None:
    first, other = (Reference(tiny_models(family, tied=tied, seed=seed)) for seed in (0, 7))
    context = make_context(tmp_path, "generator", tiny_models(family, tied=tied))
    generator = SglangGenerator(SglangConfig(cache_gib=0.0625), context)
    try:
        with asyncio.Runner() as runner:
            for temperature in (1.0, 0.7, 0.0):
                assert largest_gap(runner, generator, first, temperature) < TOLERANCE
            assert largest_gap(runner, generator, other, 1.0) > 0.1, "the two models are told apart"
            for number in range(21):
                spec = TransferSpec(
                    "shared-memory", str(tmp_path / "weights"), f"s{number}", number + 1, timeout_seconds=60.0
                )
                transfer.send(spec, (other if number % 2 == 0 else first).weights())
                generator.receive_weights(spec, number + 1).result()
                if number in (0, 20):
                    for temperature in (1.0, 0.7):
                        assert largest_gap(runner, generator, other, temperature) < TOLERANCE
    finally:
        generator.close()
