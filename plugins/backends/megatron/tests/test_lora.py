"""LoRA under every kind of parallelism, against PEFT on the same weights in one process."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from whet.component import Spec
from whet.errors import CheckpointError, ConfigError, WhetError
from whet.interfaces.weights import TransferSpec
from whet_megatron.config import OptimizerConfig
from whet_testing.three_steps import steps_of
from whet_training.lora_config import LoraConfig, adapter_info
from whet_weights.transfer import receive

peft = pytest.importorskip("peft", reason="PEFT is the independent source: pip install peft")

LORA = LoraConfig(rank=4, alpha=6.0)
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-5)
SEEDS = (0, 1, 2)
FEW = {"micro_batch_tokens": 40, "optimizer": OPTIMIZER}
"""Several micro-batches on each rank."""
LAYOUTS = {
    "one rank": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2": (2, {"pipeline": 2}),
    "context 2": (2, {"context": 2}),
}


def wrapped(folder, **config):
    """Return PEFT's model with a random adapter: neither matrix is zero."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 6.0, "target_modules": "all-linear", "init_lora_weights": False, **config}
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


def logprobs(model, batch):
    """Return the log-probability of each learned token [N], a sequence at a time. Elsewhere 0."""
    found = []
    for row in np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1]):
        tokens = torch.tensor(row)
        log_p = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0, :-1], -1)
        found.append(torch.cat([torch.zeros(1), log_p.gather(1, tokens[1:, None])[:, 0]]))
    return torch.cat(found) * torch.tensor(batch["loss_mask"])


def steps_of_peft(model, batches):
    """Return loss and gradient norm [steps, 2] of steps of torch's AdamW on the adapter that PEFT has added."""
    trained = [one for one in model.parameters() if one.requires_grad]
    of, found = OPTIMIZER, []
    optimizer = torch.optim.AdamW(trained, of.lr, of.betas, of.eps, of.weight_decay)
    for batch in batches:
        optimizer.zero_grad()
        loss = -logprobs(model, batch).sum() / int(batch["loss_mask"].sum())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return np.array(found)


@pytest.fixture(scope="module")
def reference(folders, make_batch, tmp_path_factory):
    """Return a function: name of a model -> folder of an adapter, the steps of PEFT from it, and the adapter then."""
    known = {}

    def of(name, **config):
        key = (name, *sorted(config.items()))
        if key not in known:
            model, start = wrapped(folders(name), **config), tmp_path_factory.mktemp("start")
            model.save_pretrained(start)
            steps = steps_of_peft(model, [make_batch(seed) for seed in SEEDS])
            after = {n: t.detach().clone() for n, t in peft.get_peft_model_state_dict(model).items()}
            known[key] = start, steps, after
        return known[key]

    return of


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_and_the_adapter_then_are_those_of_peft(build, reference, make_batch, tmp_path, layout, name):
    start, steps, after = reference(name)
    ranks, sizes = LAYOUTS[layout]
    backend = build(name, ranks, sizes, lora=LoraConfig(rank=4, alpha=6.0, adapter=str(start)), **FEW)
    found = steps_of(backend, [make_batch(seed) for seed in SEEDS])
    np.testing.assert_allclose(found, steps, rtol=1e-4)
    backend.save(tmp_path / "saved").result()
    ours = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert set(ours) == set(after)
    for one, tensor in after.items():
        torch.testing.assert_close(ours[one], tensor, atol=1e-4, rtol=0, msg=lambda m, n=one: f"{n}: {m}")
