"""A worker that computes the gradients of adapters of a model that `transformers` has split over ranks."""

import os
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch

from whet.interfaces.workers import WorkerRank
from whet_fsdp2.lora import Adapters, AdapterWeights
from whet_fsdp2.ranks import Ranks
from whet_training.lora_config import LoraConfig


class ParallelAdapters:
    """One rank. With one rank the model is whole."""

    def __init__(self, rank: WorkerRank) -> None:
        self._ranks = Ranks(rank)

    def compute(self, folder: str, split: dict[str, int], experts: bool) -> dict[str, Any]:
        """Return logits, and by name gradients and weights with the trial adapter merged, of two micro-batches."""
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        size = self._ranks.size
        options = {"distributed_config": DistributedConfig(**split)} if size > 1 else {}
        place = {"RANK": str(self._ranks.rank), "LOCAL_RANK": str(self._ranks.rank), "WORLD_SIZE": str(size)}
        with patch.dict(os.environ, place):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        adapters = Adapters(model, LoraConfig(rank=4, alpha=8, experts=experts), seed=0)
        with adapters.using("trial"), torch.no_grad():
            for weight, pair in adapters.pairs.items():
                for target, drawn in zip(pair, adapters.at(weight) or (), strict=True):
                    target.copy_(drawn)
        weights = AdapterWeights(cast(Any, SimpleNamespace(model=model)), adapters, size)
        draw = torch.Generator().manual_seed(0)
        for length in (11, 7):
            ids = torch.randint(3, 200, (2, length), generator=draw)
            logits = model(input_ids=ids, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        with torch.no_grad():
            without_gradient = model(input_ids=ids, use_cache=False).logits
        weights.complete_gradients()
        found = {f"gradient {name}": tensor.grad for name, tensor in weights.trained.items()}
        merged = {f"merged {name}": tensor for name, tensor in weights.computing()}
        outputs = {"logits": logits.detach(), "without gradient": without_gradient}
        return {name: tensor.numpy().copy() for name, tensor in (outputs | found | merged).items()}

    def close(self) -> None:
        """Leave the process group."""
        self._ranks.leave()
