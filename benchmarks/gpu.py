"""Measure trainer and generator on one GPU, on shapes of real models with random weights: no network, no weight files.

    python benchmarks/gpu.py                              all shapes that fit this GPU, about ten minutes
    python benchmarks/gpu.py --shapes 1.5b --kinds sft    one of them
    python benchmarks/gpu.py --shapes toy --device cpu    the same code at a toy size

    sft     steps on full rows, and a plain loop of transformers and torch beside them
    grpo    an update: scores of the sampled tokens, then a clipped step; each prompt has 8 completions
    lora    an adapter is trained, sent to the generator `hf` in this process, and sampled with, on one base

Tokens a second count all tokens of the batch, prompts of every completion included. MFU is 6 x parameters that a token
sees + 6 x layers x attention width x length for each token, over the peak of the GPU: recomputation does not count.
With a shared prompt fewer tokens are computed than the batch has, so the MFU of `grpo` counts what is computed.
"""

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import torch
from attrs import frozen

from whet.component import Spec
from whet.data.batch import Batch, from_sequences
from whet.data.model_info import read_model
from whet.data.records import Request, Sampling
from whet.interfaces.weights import IN_PLACE, TransferSpec
from whet.interfaces.workers import WorkerRank

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")
CLIPPED = Spec("whet_grpo.losses:ClippedPg", "whet_grpo.config:ClippedPgConfig", {})
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Dense bfloat16 operations a second, of the makers' data sheets."""
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "tie_word_embeddings": False, "rope_theta": 1_000_000.0,
}  # fmt: skip


@frozen
class Shape:
    """A model, and how much of it a step computes."""

    config: Mapping[str, Any]
    length: int
    """Tokens of a sequence."""
    sequences: int
    """Sequences of a step of SFT, and prompts x 8 of an update."""
    section: Mapping[str, Any] = {}
    kinds: tuple[str, ...] = ("sft", "grpo")
    least_gib: int = 0
    """Memory of a GPU that is enough."""


SHAPES = {
    "toy": Shape(
        {**_QWEN3, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512},
        length=48, sequences=16, section={"gradient_checkpointing": "selective", "offload_optimizer": True},
    ),
    "toy-moe": Shape(
        {**_QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64,
         "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2,
         "norm_topk_prob": True},
        length=48, sequences=16, kinds=("lora",),
    ),
    "1.5b": Shape(
        {**_QWEN3, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536,
         "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
         "tie_word_embeddings": True},
        length=4096, sequences=16, section={"gradient_checkpointing": "selective"}, least_gib=60,
    ),
    "8b": Shape(
        {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8},
        length=4096, sequences=8, section={"gradient_checkpointing": True, "offload_optimizer": True}, least_gib=75,
    ),
    "30b-a3b": Shape(
        {**_QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
         "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
         "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        length=2048, sequences=8, kinds=("lora",), least_gib=75,
    ),
}  # fmt: skip


def main() -> None:
    """Print a line for each shape and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.5b", "8b", "30b-a3b"])
    parser.add_argument("--kinds", nargs="+", choices=("sft", "grpo", "lora"), default=["sft", "grpo", "lora"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one that is not")
    parser.add_argument("--json", action="store_true", help="measure here, and print the figures as JSON alone")
    args = parser.parse_args()
    for name in args.shapes:
        for kind in SHAPES[name].kinds:
            if kind in args.kinds and args.json:
                print(json.dumps(measure(name, kind, args.device, args.steps)), flush=True)
            elif kind in args.kinds:
                print(report(name, kind, measure_apart(name, kind, args.device, args.steps)), flush=True)


def measure_apart(name: str, kind: str, device: str, steps: int = 2) -> dict[str, float]:
    """Return what `measure` does, of a process of its own: only its end gives pinned memory back."""
    own = [sys.executable, __file__, "--json", "--shapes", name, "--kinds", kind, "--device", device]
    lines = subprocess.run([*own, "--steps", str(steps)], check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(lines.splitlines()[-1])
    return found


def measure(name: str, kind: str, device: str, steps: int = 2) -> dict[str, float]:
    """Return what one kind of work on a shape takes: seconds of a step, tokens a second, MFU, GiB, and checks."""
    shape = SHAPES[name] if kind != "lora" else fitted(SHAPES[name], device)
    with tempfile.TemporaryDirectory() as folder, random_weights(device):
        (Path(folder) / "config.json").write_text(json.dumps(dict(shape.config)))
        if kind == "lora":
            return lora(shape, folder, device, steps)
        found = train(shape, kind, folder, device, steps)
        if kind == "sft":
            found |= {f"plain {key}": value for key, value in plain(shape, folder, device, steps).items()}
    return found


def fitted(shape: Shape, device: str) -> Shape:
    """Return the shape of `lora` with as many layers as there is room for.

    Trainer and generator compute with one base. On a GPU it is made there.
    """
    import transformers

    from whet.plan.machine import available_memory

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape.config))
    room = 0.8 * available_memory() if device == "cpu" else 0.75 * torch.cuda.mem_get_info(device)[0]
    layers, needed = shape.config["num_hidden_layers"], 2 * sum(p.numel() for p in model.parameters())
    fewer = layers if needed < room else max(1, int(layers * room / needed))
    return attrs.evolve(shape, config={**shape.config, "num_hidden_layers": fewer})


def report(name: str, kind: str, found: Mapping[str, float]) -> str:
    """Return a line for people."""
    return f"{name} {kind}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items())


# Models


def random_model(folder: str | Path, dtype: torch.dtype, device: str) -> Any:
    """Return the model of a config with random weights, the same for the same dtype and device."""
    import transformers

    config = json.loads((Path(folder) / "config.json").read_text())
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), dtype=dtype)
    return made.eval()


@contextmanager
def random_weights(device: str) -> Iterator[None]:
    """Make trainers and generators take random weights in place of a folder's."""

    def for_trainer(info: Any, head: str = "lm", seed: int = 0, *, dtype: torch.dtype, **more: Any) -> Any:
        return random_model(info.path, dtype, device)

    def for_generator(path: str, dtype: str, place: str, trust: bool) -> Any:
        return random_model(path, getattr(torch, dtype), place).requires_grad_(False)

    with mock.patch("whet_fsdp2.held.load_model", for_trainer), mock.patch("whet_hf.worker.load_model", for_generator):
        yield


def trainer(shape: Shape, folder: str, device: str, **section: Any) -> Any:
    """Return a trainer on one rank, in bfloat16."""
    from whet_fsdp2.worker import Worker

    config = {"optimizer": {"lr": 1e-5}, "micro_batch_tokens": shape.length, **shape.section, **section}
    rank = WorkerRank("backend", 0, 1, threads=1 if device == "cpu" else 8, device=device)
    return Worker(rank, config, read_model(folder, "bfloat16"), total_steps=100, scratch=folder)


# Batches


def rows(shape: Shape, seed: int = 0) -> Batch:
    """Return sequences without prompts."""
    draw = np.random.Generator(np.random.Philox(seed))
    made = [draw.integers(shape.config["vocab_size"], size=shape.length) for _ in range(shape.sequences)]
    return from_sequences(
        [{"tokens": row, "loss_mask": np.arange(len(row)) >= 1} for row in made], prompt_lengths=[1] * len(made)
    )


def groups(shape: Shape, seed: int = 0) -> Batch:
    """Return groups of 8 completions: a third of the length is prompt, and completions end after a third or two."""
    draw = np.random.Generator(np.random.Philox(seed))
    vocabulary, third, made, group = shape.config["vocab_size"], shape.length // 3, [], []
    for number in range(shape.sequences // 8):
        prompt = draw.integers(vocabulary, size=third)
        for _ in range(8):
            answer = draw.integers(vocabulary, size=int(draw.integers(third, 2 * third)))
            made.append(np.concatenate([prompt, answer]))
            group.append(number)
    batch = from_sequences(
        [{"tokens": row, "loss_mask": np.arange(len(row)) >= third} for row in made],
        prompt_lengths=[third] * len(made), group=group,
    )  # fmt: skip
    return batch.with_columns(advantages=draw.standard_normal(batch.sequences).astype(np.float32))


# Work


def train(shape: Shape, kind: str, folder: str, device: str, steps: int) -> dict[str, float]:
    """Take steps of the backend."""
    worker = trainer(shape, folder, device)
    batch, losses = (rows if kind == "sft" else groups)(shape), []

    def step() -> None:
        used = batch
        if kind == "grpo":
            old = worker.score(batch, ("logprobs",))["logprobs"]
            used = batch.with_columns(old_logprobs=old, sampler_logprobs=old)
        found = worker.train(used, LIKELIHOOD if kind == "sft" else CLIPPED)
        losses.append(found["loss"].number())

    seconds = timed(step, device, steps)
    # A scoring pass costs a third of a step.
    computed = computed_tokens(batch) * (4 / 3 if kind == "grpo" else 1)
    return {"first loss": losses[0], **rates(shape, worker._root.model, batch.tokens, computed, seconds, device)}


def plain(shape: Shape, folder: str, device: str, steps: int) -> dict[str, float]:
    """Take steps as a script would: bfloat16 weights, fused AdamW on them, full rows, checkpointing of whole layers."""
    model = random_model(folder, torch.float32, device).bfloat16()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch, losses = rows(shape), []
    ids = torch.from_numpy(batch["tokens"]).view(shape.sequences, shape.length).to(device)

    def step() -> None:
        total = 0.0
        for part in ids:
            logits = model(input_ids=part[None], use_cache=False).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum")
            loss = loss / (shape.sequences * (shape.length - 1))
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)

    seconds = timed(step, device, steps)
    return {"first loss": losses[0], **rates(shape, model, batch.tokens, batch.tokens, seconds, device)}


def lora(shape: Shape, folder: str, device: str, steps: int) -> dict[str, float]:
    """Train an adapter and sample with it, on one base. While one of trainer and generator works, the other sleeps."""
    from whet_hf.worker import Worker as Generator
    from whet_training.lora_config import LoraConfig, adapter_info

    config = LoraConfig(rank=16)
    worker = trainer(
        shape, folder, device, lora=attrs.asdict(config), gradient_checkpointing=True, optimizer={"lr": 1e-3}
    )
    batch = rows(shape)
    seconds = timed(lambda: worker.train(batch, LIKELIHOOD), device, steps)
    found = rates(shape, worker._root.model, batch.tokens, computed_tokens(batch), seconds, device)
    before = worker.score(batch.take([0]), ("logprobs",))["logprobs"]
    generator = Generator(
        WorkerRank("generator", 0, 1, threads=1 if device == "cpu" else 8, device=device), path=folder,
        dtype="bfloat16", trust_remote_code=False, max_batch=64, cache_bytes=2 << 30, fused=True,
        prefix_caching=False, scratch=folder, shared=True,
    )  # fmt: skip
    places = {weight.data_ptr() for weight in worker._root.model.parameters()}
    own = sum(weight.nbytes for weight in generator._model.parameters() if weight.data_ptr() not in places)
    away = worker.sleep()
    worker.wake()
    after = worker.score(batch.take([0]), ("logprobs",))["logprobs"]
    spec = TransferSpec(IN_PLACE, "", "session", 1, adapter=adapter_info(config))
    worker.send_weights(spec)
    generator._take_between_batches(spec, 1)
    worker.sleep()
    generator.wake()
    prompt = batch["tokens"][: shape.length // 4]
    requests = [
        Request(f"r{n}", prompt, Sampling(max_tokens=shape.length // 16 + 8), seed=n, prefix="p") for n in range(8)
    ]
    begin = clock(device)
    completions = asyncio.run(_completions(generator, requests))
    sampled = sum(len(one.tokens) for one in completions)
    rate = sampled / (clock(device) - begin)
    generator.sleep()
    worker.wake()
    made = from_sequences(
        [
            {"tokens": np.concatenate([prompt, one.tokens]),
             "loss_mask": np.arange(len(prompt) + len(one.tokens)) >= len(prompt)}
            for one in completions
        ],
        prompt_lengths=[len(prompt)] * len(completions), group=[0] * len(completions),
    )  # fmt: skip
    ours = worker.score(made, ("logprobs",))["logprobs"][made["loss_mask"]]
    base = worker.score(made, ("logprobs",), "base")["logprobs"][made["loss_mask"]]
    theirs = np.concatenate([one.logprobs for one in completions])
    return {
        **found,
        "layers": shape.config["num_hidden_layers"],
        "GiB of weights of the generator's own": own / 2**30,
        "GiB moved by sleep": away / 2**30,
        "sampled tokens a second": rate,
        "logprobs after sleep differ by": float(np.abs(after - before).max()),
        "mean gap of logprobs to the generator": float(np.abs(ours - theirs).mean()),
        "and without the adapter": float(np.abs(base - theirs).mean()),
    }


async def _completions(generator: Any, requests: list[Request]) -> list[Any]:
    found = [one async for some in generator.generate(requests) for one in some]
    assert not any(isinstance(one, tuple) for one in found), found
    return sorted(found, key=lambda one: [request.id for request in requests].index(one.id))


# Figures


def clock(device: str) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(step: Any, device: str, steps: int) -> float:
    """Return the seconds of a step, the mean of several after a first one."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    step()
    begin = clock(device)
    for _ in range(steps):
        step()
    return (clock(device) - begin) / steps


def computed_tokens(batch: Batch) -> int:
    """Return how many tokens pass through the model where prompts are shared."""
    from whet_training.layout import pack

    return len(pack(batch, "shared").tokens)  # type: ignore[arg-type]  # packed rows have a flat column


def rates(shape: Shape, model: Any, tokens: int, computed: float, seconds: float, device: str) -> dict[str, float]:
    """Return seconds, tokens a second, MFU and the peak of memory."""
    config = shape.config
    # Experts that a token does not see do not count; the embedding is a look-up.
    inner = sum(math.prod(p.shape) for name, p in model.named_parameters() if "embed_tokens" not in name)
    experts = sum(math.prod(p.shape) for name, p in model.named_parameters() if ".experts." in name)
    seen = inner - experts
    if experts:
        seen += experts * config["num_experts_per_tok"] / config["num_experts"]
    if config["tie_word_embeddings"]:
        seen += config["vocab_size"] * config["hidden_size"]
    width = config["num_attention_heads"] * config["head_dim"]
    attention = 6 * config["num_hidden_layers"] * width * shape.length
    found = {"seconds": seconds, "tokens a second": tokens / seconds}
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
        peak = next((number for key, number in PEAKS.items() if key in name), None)
        if peak:
            found["MFU"] = computed * (6 * seen + attention) / seconds / peak
        found["peak GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


if __name__ == "__main__":
    main()
