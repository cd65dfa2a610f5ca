"""A trainer and a generator that computes with the trainer's own weights, both in this process, without a run."""

import asyncio

import numpy as np
from attrs import evolve

from whet.component import Spec
from whet.data.batch import from_sequences
from whet.data.records import Request, Sampling
from whet.interfaces.weights import IN_PLACE, TransferSpec
from whet.runtime.inline import InlineWorkerGroup
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config, OptimizerConfig
from whet_hf.config import HfConfig
from whet_hf.generator import HfGenerator
from whet_testing.role_context import make_context

TEMPERATURE = 0.7


class Pair:
    """A backend `fsdp2` and a generator `hf` with its weights."""

    def __init__(self, folder, model, *, asleep=False, dtype="float32", threads=1, prefix_caching=False, **section):
        """`asleep`: the generator starts while the backend sleeps. `threads`: those of the generator."""
        config = Fsdp2Config(optimizer=OptimizerConfig(lr=1e-2), **section)
        self.generator, self._sessions = None, 0
        self.backend = Fsdp2Backend(config, make_context(folder / "backend", "backend", model, dtype=dtype))
        self.released = self.backend.sleep() if asleep else 0
        group = InlineWorkerGroup("generator", threads=threads)
        context = make_context(folder / "generator", "generator", model, group, dtype=dtype, transport=IN_PLACE)
        shared = HfConfig(weights="shared", prefix_caching=prefix_caching)
        try:
            self.generator = HfGenerator(shared, evolve(context, adapter=self.adapter))
        except BaseException:
            self.close()
            raise

    @property
    def adapter(self):
        """What a receiver must know of the adapter; None: all weights are trained."""
        adapters = self.trainer._adapters
        return None if adapters is None else adapters.info

    @property
    def trainer(self):
        """The worker that trains."""
        return self.backend._workers._workers[0]

    @property
    def sampler(self):
        """The worker that generates."""
        return self.generator._replicas.workers._workers[0]

    def spec(self, version, weights="policy", session=""):
        """Return a weight sync."""
        self._sessions += 1
        name = session or f"s{self._sessions}"
        return TransferSpec(
            IN_PLACE, "", name, version, timeout_seconds=30.0, weights=weights, adapter=self.adapter
        )  # fmt: skip

    def sync(self, version, weights="policy"):
        """Hand the weights over."""
        spec = self.spec(version, weights)
        for end in (self.backend.send_weights(spec), self.generator.receive_weights(spec, version)):
            end.result()

    def ask(self, count=5, most=12, prompts=()):
        """Return requests with their completions: of several lengths, unless prompts are given."""
        prompts = prompts or [np.arange(5, 8 + 3 * (i % 5)) for i in range(count)]
        requests = [Request(f"r{i}", prompt, Sampling(most, TEMPERATURE), seed=i) for i, prompt in enumerate(prompts)]

        async def together():
            return await asyncio.gather(*map(self.generator.generate, requests))

        return list(zip(requests, asyncio.run(together()), strict=True))

    def gap(self, found, weights="policy"):
        """Return the largest difference of the sampler's logprobs from the trainer's, in nats."""
        batch = batch_of(found)
        scored = self.backend.score(batch, ("logprobs",), weights)["logprobs"]
        mine = np.concatenate([completion.logprobs for _, completion in found])
        return float(np.abs(scored[batch["loss_mask"] > 0] - mine).max())

    def train(self, found):
        """Take a step towards completions."""
        self.backend.train(batch_of(found), Spec("whet_testing.losses:Likelihood"))

    def close(self):
        """End both."""
        if self.generator is not None:
            self.generator.close()
        self.backend.close()


def batch_of(found):
    sequences = [
        {
            "tokens": np.concatenate([request.tokens, completion.tokens]),
            "loss_mask": np.arange(len(request.tokens) + len(completion.tokens)) >= len(request.tokens),
        }
        for request, completion in found
    ]
    batch = from_sequences(sequences, prompt_lengths=[len(request.tokens) for request, _ in found])
    return batch.with_columns(temperature=np.full(len(found), TEMPERATURE, np.float32))
