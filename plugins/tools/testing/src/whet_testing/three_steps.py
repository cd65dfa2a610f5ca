"""Optimizer steps by `transformers` and torch's AdamW in one process: what every training backend must compute."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from whet.component import Spec
from whet.data.batch import Batch, from_sequences
from whet.interfaces.backend import Backend

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")
"""The loss of `steps_by_hand`."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "heads": 4, "kv_heads": 2, "head_dim": 24, "hidden": 96, "tied": False},
    "qwen2": {"family": "qwen2", "heads": 4, "kv_heads": 1, "head_dim": 24, "hidden": 96, "tied": True},
    "qwen3": {"family": "qwen3", "heads": 4, "kv_heads": 2, "head_dim": 24, "hidden": 48, "tied": True},
    "qwen3 untied": {"family": "qwen3", "heads": 4, "kv_heads": 4, "head_dim": 24, "hidden": 96, "tied": False},
    "qwen3_moe": {"family": "qwen3_moe", "head_dim": 24, "hidden": 48, "mlp": 32, "tied": True},
    "mixtral": {"family": "mixtral", "head_dim": 24, "hidden": 48, "mlp": 32, "tied": False},
}
"""Arguments of `make_model`. With 24 values a head, the scale of attention is no power of two, so sums round."""


def stirred_model(folder: Path, tokenizer: Any, name: str, **changes: Any) -> Path:
    """Write a random model of a family, whose norms and biases are not 0 and 1, so that one left out would show."""
    import torch
    from safetensors.torch import load_file, save_file

    from whet_start.small_models import make_model

    path = make_model(folder, tokenizer, **{"layers": 2, **FAMILIES[name], **changes})
    draw, file = torch.Generator().manual_seed(0), path / "model.safetensors"
    weights = {
        name: w + 0.2 * torch.randn(w.shape, generator=draw) if w.ndim == 1 else w
        for name, w in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return path


def grouped_batch(seed: int = 0, vocabulary: int = 200) -> Batch:
    """Return three groups of four samples that share a prompt, with gaps in the loss mask, and a sequence by itself."""
    draw = np.random.default_rng(seed)
    rows, prompts, group = [], [], []
    for g, samples in enumerate((4, 4, 4, 1)):
        prompt = draw.integers(3, vocabulary, size=draw.integers(3, 9))
        for _ in range(samples):
            answer = draw.integers(3, vocabulary, size=draw.integers(1, 12))
            learned = draw.random(len(answer)) < 0.8
            learned[-1] = draw.random() < 0.5
            rows.append(
                {
                    "tokens": np.concatenate([prompt, answer]),
                    "loss_mask": np.concatenate([np.zeros(len(prompt), bool), learned]),
                }
            )
            prompts.append(len(prompt))
            group.append(g)
    made = from_sequences(rows, prompt_lengths=prompts, group=group)
    return made.with_columns(advantages=draw.standard_normal(made.sequences).astype(np.float32))


def steps_of(backend: Backend, batches: Iterable[Batch], loss: Spec = LIKELIHOOD) -> Any:
    """Return loss and gradient norm [steps, 2] of a backend's steps, to compare with those of `steps_by_hand`."""
    found = [backend.train(batch, loss) for batch in batches]
    return np.array([(one["loss"].number(), one["grad_norm"].number()) for one in found])


def steps_by_hand(
    folder: Path, batches: Iterable[Batch], lr: float, weight_decay: float, betas: tuple[float, float], eps: float
) -> Any:
    """Return loss and gradient norm [steps, 2] of likelihood training with the gradient clipped to 1, a sequence at a
    time. Vectors are not decayed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    named = list(net.named_parameters())
    matrices, vectors = [p for _, p in named if p.ndim >= 2], [p for _, p in named if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    found = []
    for batch in batches:
        count, total = float(batch["loss_mask"].sum()), 0.0
        for i in range(batch.sequences):
            one = batch.take([i])
            tokens, mask = torch.from_numpy(one["tokens"]), torch.from_numpy(one["loss_mask"])
            logits = net(input_ids=tokens[None, :-1], use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
            loss = -logprobs[mask[1:]].sum() / count
            if mask.any():
                torch.autograd.backward(loss)
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        found.append((total, float(norm)))
    return np.array(found)
