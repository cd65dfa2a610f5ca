"""A generator that computes with the backend's own weights: nothing is copied, and every step counts at once."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.data.batch import Batch, from_sequences
from whet.data.records import Completion, Request, Sampling
from whet.errors import WhetError, WorkerError
from whet.interfaces.weights import IN_PLACE, TransferSpec
from whet.runtime.local import LocalCluster
from whet_megatron.backend import MegatronBackend
from whet_megatron.config import MegatronConfig, OptimizerConfig
from whet_megatron.generator.config import MegatronGeneratorConfig, SplitConfig
from whet_megatron.generator.handle import MegatronGenerator
from whet_megatron.parallel import ParallelConfig
from whet_testing.held import held_processes
from whet_testing.role_context import make_context
from whet_testing.three_steps import LIKELIHOOD
from whet_training.lora_config import LoraConfig

IMPORTS = ("whet_megatron.worker", "whet_megatron.generator.worker", "whet_megatron.ahead")
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("qwen3", {"tensor": 2, "sequence": True}),
    "pipeline": ("qwen3", {"pipeline": 2}),
    "data": ("qwen3", {}),
    "experts": ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 2}),
}


class Pair:
    """A backend and a generator with its weights, on one rank in this process or on processes that they share."""

    def __init__(
        self, folder: Path, model: Path, sizes: dict[str, Any], cluster: LocalCluster | None = None,
        lora: LoraConfig | None = None, **config: Any,
    ) -> None:  # fmt: skip
        parallel, ranks = ParallelConfig(**sizes), 2 if cluster else 1

        def context(role: str) -> Any:
            group = cluster.worker_group(role, ranks) if cluster else None
            return make_context(folder / role, role, model, group, transport=IN_PLACE)

        optimizer = OptimizerConfig(lr=1e-2)
        trained = MegatronConfig(optimizer=optimizer, parallel=parallel, lora=lora)
        self.backend = MegatronBackend(trained, context("backend"))
        self.generator: MegatronGenerator | None = None
        made = MegatronGeneratorConfig(
            **{"parallel": SplitConfig(**sizes), "cache_gib": 0.01, "max_batch": 8, **config}
        )
        try:
            self.generator = MegatronGenerator(made, context("generator"))
        except BaseException:
            self.close()
            raise

    def ask(self, *, count: int = 5, most: int = 12) -> list[tuple[Request, Completion]]:
        """Return requests of several lengths with their completions."""
        assert self.generator is not None
        prompts = [np.arange(5, 8 + 3 * i) for i in range(count)]
        requests = [Request(f"r{i}", prompt, Sampling(most, 0.7), seed=i) for i, prompt in enumerate(prompts)]

        async def together() -> list[Completion]:
            assert self.generator is not None
            return await asyncio.gather(*map(self.generator.generate, requests))

        return list(zip(requests, asyncio.run(together()), strict=True))

    def gap(self, found: list[tuple[Request, Completion]], weights: Any = "policy") -> float:
        """Return the largest difference of the sampler's logprobs from the trainer's, in nats."""
        batch = batch_of(found)
        scored = self.backend.score(batch, ("logprobs",), weights)["logprobs"]
        mine = np.concatenate([completion.logprobs for _, completion in found])
        return float(np.abs(scored[batch["loss_mask"] > 0] - mine).max())

    def sync(self, version: int, weights: str = "policy") -> None:
        """Hand the weights over."""
        assert self.generator is not None
        spec = TransferSpec("in-place", "", f"s{version}", version, timeout_seconds=30.0, weights=weights)
        ends = [self.backend.send_weights(spec), self.generator.receive_weights(spec, version)]
        for end in ends:
            end.result()

    def close(self) -> None:
        """End both."""
        if self.generator is not None:
            self.generator.close()
        self.backend.close()


def batch_of(found: list[tuple[Request, Completion]]) -> Batch:
    sequences = [
        {
            "tokens": np.concatenate([request.tokens, completion.tokens]),
            "loss_mask": np.arange(len(request.tokens) + len(completion.tokens)) >= len(request.tokens),
        }
        for request, completion in found
    ]
    batch = from_sequences(sequences, prompt_lengths=[len(request.tokens) for request, _ in found])
    return batch.with_columns(temperature=np.full(len(found), 0.7, np.float32))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with held_processes(tmp_path_factory.mktemp("logs"), {("backend", "generator"): 2}, IMPORTS) as made:
        yield made


@pytest.fixture
def pair(folders: Any, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, folders("qwen3"), {})
    yield made
    made.close()


@pytest.mark.parametrize("split", SPLITS)
def test_after_each_step_the_sampler_s_logprobs_are_the_trainer_s(
    split: str, shared: LocalCluster, folders: Any, tmp_path: Path
) -> None:
    name, sizes = SPLITS[split]
    pair = Pair(tmp_path, folders(name), sizes, shared)
    try:
        before = pair.ask()
        for version in (1, 2):
            pair.backend.train(batch_of(before), LIKELIHOOD)
            pair.sync(version)
            after = pair.ask()
            assert pair.gap(after) < 1e-4
            assert {completion.versions for _, completion in after} == {((0, version),)}
            assert pair.gap(before) > 1e-2, "the step changed too little to see which weights were used"
            before = after
    finally:
        pair.close()


@pytest.mark.parametrize(("name", "experts"), [("qwen3", False), ("qwen3_moe", True)])
def test_an_adapter_is_used_as_it_is_and_a_trial_until_the_next_weight_sync(
    folders: Any, tmp_path: Path, name: str, experts: bool
) -> None:
    pair = Pair(tmp_path, folders(name), {}, lora=LoraConfig(rank=2, experts=experts))
    try:
        pair.sync(0, "trial")
        trial = pair.ask()
        assert pair.gap(trial, "trial") < 1e-4
        assert pair.gap(trial) > 1e-2
        pair.backend.train(batch_of(trial), LIKELIHOOD)
        pair.sync(1)
        after = pair.ask()
        assert pair.gap(after) < 1e-4
        assert pair.gap(after, "base") > 1e-3
    finally:
        pair.close()


def test_nothing_is_copied(pair: Pair) -> None:
    assert pair.generator is not None
    trainer, sampler = pair.backend._workers._workers[0], pair.generator._workers._workers[0]  # type: ignore[attr-defined]
    places = [weight.data_ptr() for weight in trainer._model.parameters()]
    pair.backend.train(batch_of(pair.ask()), LIKELIHOOD)
    pair.sync(1)
    assert [weight.data_ptr() for weight in sampler._engine._stage.parameters()] == places
    assert pair.gap(pair.ask()) < 1e-4


def test_while_the_backend_sleeps_the_weights_stay_and_the_optimizer_goes(pair: Pair) -> None:
    assert pair.generator is not None
    batch, before = batch_of(pair.ask()), pair.ask()
    pair.backend.train(batch, LIKELIHOOD)
    after = pair.ask()
    assert pair.backend.sleep() > 0
    asleep = pair.ask()
    assert [c.tokens.tolist() for _, c in asleep] == [c.tokens.tolist() for _, c in after]
    assert [c.tokens.tolist() for _, c in asleep] != [c.tokens.tolist() for _, c in before]
    pair.backend.wake()
    assert pair.generator.sleep() > 0
    pair.backend.train(batch, LIKELIHOOD)
    pair.generator.wake()
    assert pair.gap(pair.ask()) < 1e-4


def test_a_generator_that_starts_while_the_backend_sleeps_brings_the_weights_back(folders: Any, tmp_path: Path) -> None:
    backend = MegatronBackend(MegatronConfig(), make_context(tmp_path / "one", "backend", folders("qwen3")))
    try:
        released = backend.sleep()
        generator = MegatronGenerator(
            MegatronGeneratorConfig(cache_gib=0.01, max_batch=8),
            make_context(tmp_path / "two", "generator", folders("qwen3"), transport=IN_PLACE),
        )
        request = Request("r", np.arange(5, 9), Sampling(4), seed=0)
        completion = asyncio.run(generator.generate(request))
        backend.wake()
        assert backend.sleep() < released, "the weights were released although the generator computes with them"
        backend.wake()
        scored = backend.score(batch_of([(request, completion)]).with_columns(temperature=np.ones(1, np.float32)),
                               ("logprobs",))["logprobs"]  # fmt: skip
        assert np.abs(scored[4:] - completion.logprobs).max() < 1e-4
        generator.close()
    finally:
        backend.close()


def test_a_weight_sync_that_the_backend_did_not_take_part_in_is_refused(pair: Pair) -> None:
    assert pair.generator is not None
    pair.sync(1)
    for spec in (TransferSpec("in-place", "", "other", 1), TransferSpec("in-place", "", "s1", 2)):
        with pytest.raises(WorkerError, match="sent session s1 of version 1"):
            pair.generator.receive_weights(spec, spec.version).result()
        with pytest.raises(WhetError, match="no weights to use"):
            pair.ask(count=1)
    pair.sync(3)
    assert pair.ask(count=1)[0][1].versions == ((0, 3),)


def test_without_a_backend_in_its_process_it_says_what_to_change(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"set\s+generator\.weights: own"):
        MegatronGenerator(
            MegatronGeneratorConfig(), make_context(tmp_path, "generator", folders("qwen3"), transport=IN_PLACE)
        )


def test_where_no_weights_are_synced_it_loads_its_own(folders: Any, tmp_path: Path) -> None:
    """As in an evaluation without training."""
    request, found = Request("r", np.arange(5, 9), Sampling(8), seed=0), []
    for weights in ("shared", "own"):
        config = MegatronGeneratorConfig(cache_gib=0.01, max_batch=8, weights=weights)  # type: ignore[arg-type]
        generator = MegatronGenerator(config, make_context(tmp_path / weights, "generator", folders("qwen3")))
        try:
            found.append(asyncio.run(generator.generate(request)))
        finally:
            generator.close()
    shared, own = found
    assert shared.tokens.tolist() == own.tokens.tolist()
    np.testing.assert_array_equal(shared.logprobs, own.logprobs)


def test_ranks_that_share_the_model_otherwise_are_refused(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="the backend has 1 as"):
        Pair(tmp_path, folders("qwen3"), {}, parallel=SplitConfig(tensor=2))
