"""Both ends of weight syncs that bring a LoRA adapter, without a run around them."""

from itertools import count

import numpy as np
from attrs import evolve

from whet.component import Spec
from whet.config.cluster import ClusterSection
from whet.config.sections import ProbeSection
from whet.data.batch import from_sequences
from whet.data.records import Request, Sampling
from whet.data.spans import Spans
from whet.plan.placement import Way
from whet.rollout.event_loop import EpisodeLoop
from whet.run.weight_sync import make_weight_sync
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config, OptimizerConfig
from whet_testing.role_context import make_context
from whet_training.lora_config import LoraConfig, adapter_info
from whet_weights.probe import Probe

LORA = LoraConfig(rank=4, alpha=8.0)
TOKENS = np.arange(3, 200)


class Ends:
    """A trainer of an adapter, a generator that gets it alone, and one that gets it merged: all in this process."""

    def __init__(self, folder, model, make_generator, lora=LORA):
        self.folder, self.lora, self.numbers = folder, lora, count()
        config = Fsdp2Config(lora=lora, optimizer=OptimizerConfig(lr=1e-2))
        self.backend = Fsdp2Backend(config, make_context(folder / "backend", "backend", model))
        self.loop = EpisodeLoop()
        self.generators = {}
        for content in ("adapter", "merged"):
            context = make_context(folder / content, "generator", model)
            info = adapter_info(lora) if content == "adapter" else None
            self.generators[content] = make_generator(evolve(context, adapter=info))

    def sync(self, content="adapter", trial=True):
        """Return a weight sync of a new attempt, with its probe."""
        way = Way("disk", "", adapter=adapter_info(self.lora) if content == "adapter" else None)
        folder = self.folder / f"weights-{next(self.numbers)}"
        made = make_weight_sync(way, folder, section=ClusterSection(), cluster=None, spans=Spans(), closers=[])
        probe = Probe(
            ProbeSection(), 0, (), TOKENS, room=64, temperature=1.0, dtypes=("float32", "float32"), replicas=1,
            generator=self.generators[content], run=self.loop.run, trial=trial,
            score=lambda batch, weights: self.backend.score(batch, ("logprobs",), weights)["logprobs"],
        )  # fmt: skip
        made.connect(self.backend, self.generators[content], probe=probe)
        return made, probe

    def train(self):
        """Take a step that moves the adapter."""
        rows = [{"tokens": TOKENS[i : i + 12], "loss_mask": np.arange(12) > 3} for i in range(0, 60, 12)]
        batch = from_sequences(rows, prompt_lengths=[4] * 5).with_columns(advantages=np.linspace(-1, 2, 5, dtype="f4"))
        self.backend.train(batch, Spec("whet_testing.losses:Weighted"))

    def sampled(self, content="adapter"):
        """Return tokens and logprobs of a few completions."""
        requests = [
            Request(f"{next(self.numbers)}", TOKENS[i : i + 5], Sampling(6, 1.0), seed=i, replica=0) for i in (0, 7, 90)
        ]

        async def ask():
            return [await self.generators[content].generate(request) for request in requests]

        return [(found.tokens, found.logprobs) for found in self.loop.run(ask())]

    def close(self):
        self.backend.close()
        for generator in self.generators.values():
            generator.close()
        self.loop.close()
