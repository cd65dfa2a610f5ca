"""Tiny models, batches, and workers without a cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.component import Spec
from whet.data.batch import Batch
from whet.data.model_info import read_model
from whet.interfaces.workers import WorkerRank
from whet_fsdp2.worker import Worker
from whet_start.small_models import make_model
from whet_testing.three_steps import grouped_batch, stirred_model

LOSS = Spec("whet_testing.losses:Weighted")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[[str], Path]:
    """Return the folder of a model of a family; norms and biases are not at their defaults."""
    made: dict[str, Path] = {}

    def folder(name: str = "qwen3") -> Path:
        if name not in made:
            made[name] = stirred_model(tmp_path_factory.mktemp("model"), tiny_tokenizer, name)
        return made[name]

    return folder


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random mixture of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=48, intermediate_size=64, moe_intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, num_experts=6, num_experts_per_tok=2,
        max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("moe")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ernie(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Return the folder of a mixture of experts whose class keeps routers in float32.

    The router's rows of three experts differ by less than a bfloat16 can hold, and two of them are chosen.
    """
    from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig

    folder = make_model(tmp_path_factory.mktemp("ernie"), tiny_tokenizer)
    config = Ernie4_5_MoeConfig(
        vocab_size=len(tiny_tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
        moe_num_experts=6, moe_k=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        moe_layer_start_index=0, moe_num_shared_experts=1, max_position_embeddings=64, initializer_range=0.15,
    )  # fmt: skip
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in model.model.layers:
            rows = layer.mlp.gate.weight
            rows.copy_(rows.bfloat16())
            for more in (1, 2):
                rows[more::3] = rows[::3] * (1 + more * 2**-10)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def make_worker(folders: Callable[[str], Path], tmp_path: Path) -> Callable[..., Worker]:
    """Return a function that builds a worker of one rank: `make_worker(family, dtype=..., **config)`."""

    def make(
        family: str = "qwen3",
        dtype: str = "float32",
        folder: Path | None = None,
        role: str = "backend",
        device: str = "cpu",
        trained: bool = True,
        **config: Any,
    ) -> Worker:
        config.setdefault("optimizer", {"lr": 1e-2})
        model = read_model(folder or folders(family), dtype)
        scratch = str(tmp_path / "scratch")  # other tests at the same time have theirs
        rank = WorkerRank(role, 0, 1, device=device)
        return Worker(rank, config, model, total_steps=10, trained=trained, scratch=scratch)

    return make


@pytest.fixture
def batch() -> Batch:
    """Return three groups of four samples that share a prompt, with gaps in the loss mask, and a sequence by itself."""
    return grouped_batch()


def gradients(worker: Worker, batch: Batch, loss: Spec = LOSS) -> dict[str, torch.Tensor]:
    """Compute the gradients that a step on the batch would use."""
    from whet_training.ranks import Watch

    made = worker._loss(loss)
    worker._weights.drop_gradients()
    watch = Watch(worker._device, "backend")
    worker._accumulate(worker._live(batch, made), made, worker._counts(made, batch), watch)
    found = {name: master.grad.clone() for name, master in worker._weights.trained.items()}
    worker._weights.drop_gradients()
    return found


@pytest.fixture(name="gradients")
def _gradients() -> Callable[..., dict[str, torch.Tensor]]:
    return gradients


@pytest.fixture(name="make_batch", scope="session")
def _make_batch() -> Callable[..., Batch]:
    return grouped_batch


@pytest.fixture(scope="module", autouse=True)
def _forked(forked_workers: None) -> None:
    """Workers that start from this process need not import torch again."""
