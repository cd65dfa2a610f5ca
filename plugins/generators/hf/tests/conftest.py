"""What tests of decoding start from: models of several shapes, jobs, and a full forward to compare with."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whet.data.records import Completion, Request, Sampling
from whet_generation.stopping import StopStrings
from whet_hf.decode import Aborts, Job, decode
from whet_hf.loading import choose_decoder, load_model
from whet_hf.swap import Weights
from whet_start.small_models import make_model

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen3-untied-head-24": {"family": "qwen3", "tied": False, "head_dim": 24, "kv_heads": 1},
    "qwen2": {"family": "qwen2", "kv_heads": 2},
    "llama": {"family": "llama", "kv_heads": 4, "layers": 3},
    "llama-gqa-untied": {"family": "llama", "kv_heads": 1, "tied": False, "hidden": 48, "mlp": 100},
}


class Decoding:
    """A model with a decoder, and what is needed to decode with it."""

    def __init__(self, folder: Path, fused: bool = True, dtype: str = "float32", cache_bytes: int = 0) -> None:
        self.folder = folder
        self.model = load_model(str(folder), dtype, "cpu", False)
        self.decoder = choose_decoder(self.model, fused=fused, cache_bytes=cache_bytes)
        self.strings = StopStrings(folder)
        self.aborts = Aborts()

    def decode(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode as one batch; completions in the order of the requests."""
        jobs = sorted((Job(r, r.sampling.max_tokens) for r in requests), key=lambda job: job.place)
        found = decode(self.decoder, jobs, self.strings, Weights(), self.aborts, torch.device("cpu"))
        by_id = {completion.id: completion for completion in found}
        return [by_id[request.id] for request in requests]

    def gap(self, request: Request, completion: Completion) -> float:
        """Find the largest difference to the logprobs of a full forward, in nats."""
        sequence = torch.from_numpy(np.concatenate([request.tokens, completion.tokens]))
        temperature = request.sampling.temperature or 1.0
        with torch.no_grad():
            logits = self.model(input_ids=sequence[None], use_cache=False).logits[0].double() / temperature
        expected = logits.log_softmax(-1)[len(request.tokens) - 1 : -1].gather(1, sequence[len(request.tokens) :, None])
        return float((expected[:, 0] - torch.from_numpy(completion.logprobs)).abs().max())


def make_requests(
    count: int = 12, *, seed: int = 0, group: int = 3, vocab: int = 384, **sampling: Any
) -> list[Request]:
    """Make requests of many lengths, each prompt `group` times, with two temperatures and many limits."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, vocab, rng.integers(1, 40)) for _ in range(-(-count // group))]
    settings = [
        Sampling(**{"max_tokens": 4 + 3 * (i % 7), "temperature": (1.0, 0.7)[i % 2], **sampling}) for i in range(count)
    ]
    return [Request(f"r{i}", prompts[i // group], settings[i], 1000 * seed + i) for i in range(count)]


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[[str], Path]:
    """Return the folder of a random model of one of the shapes."""
    made: dict[str, Path] = {}

    def folder(shape: str) -> Path:
        if shape not in made:
            made[shape] = make_model(tmp_path_factory.mktemp(shape), tiny_tokenizer, **SHAPES[shape])
        return made[shape]

    return folder


@pytest.fixture(scope="session")
def load(model_folders: Callable[[str], Path]) -> Callable[..., Decoding]:
    """Load a model of one of the shapes, e.g. `"qwen3", fused=False`."""
    return lambda shape, **options: Decoding(model_folders(shape), **options)


@pytest.fixture(scope="session")
def decoding(model_folders: Callable[[str], Path]) -> Decoding:
    """A Qwen3 model with the fused decoder. Leave its weights as they are."""
    return Decoding(model_folders("qwen3"))


@pytest.fixture(scope="session")
def requests_of() -> Callable[..., list[Request]]:
    """Make requests; see `make_requests`."""
    return make_requests


@pytest.fixture(scope="module", autouse=True)
def _forked(forked_workers: None) -> None:
    """Workers that start from this process need not import torch again."""
