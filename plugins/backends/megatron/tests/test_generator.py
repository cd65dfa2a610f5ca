"""The generator keeps the contract of generators, with weights of its own."""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from attrs import evolve

from whet.component import GeneratorFacts
from whet.data.records import Completion, Request, Sampling
from whet.errors import WhetError
from whet.interfaces.workers import RoleContext
from whet_megatron.generator.config import MegatronGeneratorConfig, SplitConfig, facts
from whet_megatron.generator.handle import MegatronGenerator
from whet_testing.contracts.component import MODEL
from whet_testing.contracts.generator import ModelGeneratorContract
from whet_testing.reference import Reference
from whet_testing.role_context import make_context
from whet_testing.served import gap

LAYERS: Literal["auto", "test"] = "auto" if importlib.util.find_spec("transformer_engine") else "test"
"""The layers on a GPU: without Transformer Engine, the plain ones can be tested there."""
OWN = MegatronGeneratorConfig(weights="own", cache_gib=0.02, max_batch=64, layers=LAYERS)


class TestOwnWeights(ModelGeneratorContract):
    transports: tuple[str, ...] = ("shared", "shared-memory", "disk")
    on_weight_update = ("drain", "continue", "abort")
    config = OWN

    def make(self, context: RoleContext) -> MegatronGenerator:
        return MegatronGenerator(self.config, context)

    def facts(self) -> GeneratorFacts:
        return facts(self.config, MODEL)


@pytest.mark.slow
class TestOnTwoTensorRanks(TestOwnWeights):
    processes = 2
    transports: tuple[str, ...] = ("shared-memory", "disk")
    config = evolve(OWN, parallel=SplitConfig(tensor=2, sequence=True))


def gaps(folder: Path, context: RoleContext, config: MegatronGeneratorConfig = OWN, count: int = 6) -> list[float]:
    """Return the differences of a generator's logprobs from those of `transformers`, in nats."""
    generator, reference = MegatronGenerator(config, context), Reference(folder)
    requests = [Request(f"r{i}", np.arange(5, 6 + 5 * i), Sampling(4 * i + 1), seed=i) for i in range(count)]
    try:
        completions = asyncio.run(gathered(generator, requests))
        return [gap(reference, *pair, 1.0) for pair in zip(requests, completions, strict=True)]
    finally:
        generator.close()


async def gathered(generator: MegatronGenerator, requests: list[Request]) -> list[Completion]:
    return await asyncio.gather(*map(generator.generate, requests))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "mixtral"])
def test_every_family_is_sampled_as_transformers_computes_it(name: str, folders: Any, tmp_path: Path) -> None:
    folder = folders(name)
    assert max(gaps(folder, make_context(tmp_path, "generator", folder))) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 2}),
        ("llama", {"pipeline": 2}),
        ("qwen3", {"pipeline": 2}),
        ("qwen3", {}),
    ],
    ids=str,
)
def test_every_split_is_sampled_as_transformers_computes_it(
    name: str, sizes: dict[str, Any], place: Any, folders: Any, tmp_path: Path
) -> None:
    folder, config = folders(name), evolve(OWN, parallel=SplitConfig(**sizes))
    assert max(gaps(folder, make_context(tmp_path, "generator", folder, place(2)), config)) < 1e-4


def test_in_bfloat16_it_samples_within_rounding(folders: Any, tmp_path: Path) -> None:
    folder = folders("qwen3")
    found = gaps(folder, make_context(tmp_path, "generator", folder, dtype="bfloat16"))
    assert 1e-4 < max(found) < 0.1


@pytest.mark.parametrize("config", [{"cache_gib": 1.5e-4}, {"max_batch": 2}, {"prefill_tokens": 3}], ids=str)
def test_neither_cache_nor_batch_changes_a_token(config: dict[str, Any], folders: Any, tmp_path: Path) -> None:
    requests = [Request(f"r{i}", np.arange(5, 6 + 3 * i), Sampling(20), seed=i) for i in range(12)]
    found = []
    for number, made in enumerate((OWN, evolve(OWN, **config))):
        context = make_context(tmp_path / str(number), "generator", folders("qwen3"))
        generator = MegatronGenerator(made, context)
        found.append(asyncio.run(gathered(generator, requests)))
        generator.close()
    for one, other in zip(*found, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_request_that_the_cache_never_holds_is_refused_alone(folders: Any, tmp_path: Path) -> None:
    generator = MegatronGenerator(evolve(OWN, cache_gib=1.5e-4), make_context(tmp_path, "generator", folders("qwen3")))
    requests = [Request(str(most), np.arange(5, 9), Sampling(most), seed=0) for most in (200, 4)]

    async def both() -> list[Any]:
        return await asyncio.gather(*map(generator.generate, requests), return_exceptions=True)

    large, small = asyncio.run(both())
    generator.close()
    assert "generator.cache_gib" in str(large)
    assert len(small.tokens) == 4


@pytest.mark.parametrize("ends", [False, True], ids=["sleeps", "closed"])
def test_a_request_that_was_under_way_is_served_after_a_sleep_and_fails_after_a_close(
    ends: bool, folders: Any, tmp_path: Path
) -> None:
    generator = MegatronGenerator(OWN, make_context(tmp_path, "generator", folders("qwen3")))

    async def ask() -> Completion:
        asked = asyncio.create_task(generator.generate(Request("r", np.arange(5, 9), Sampling(4), seed=0)))
        await asyncio.sleep(0)  # the request is on its way to the thread
        _ = generator.close() if ends else generator.sleep()
        await asyncio.sleep(0)
        if not ends:
            generator.wake()
        return await asyncio.wait_for(asked, 60)

    try:
        if ends:
            with pytest.raises(WhetError, match="request r comes after the generator was closed"):
                asyncio.run(ask())
        else:
            assert len(asyncio.run(ask()).tokens) == 4
    finally:
        generator.close()
