"""Compare the predicted peak of memory of a training step with the measured one, on a CPU.

    python benchmarks/memory_prediction.py                 twelve configurations
    python benchmarks/memory_prediction.py --only 0 5      some of them
    python benchmarks/memory_prediction.py --small         six small ones; a test runs them
    python benchmarks/memory_prediction.py --layouts       tensor, expert and context parallelism, copies
    python benchmarks/memory_prediction.py --megatron      stages of pipelines and other layouts of the backend megatron

Predicted: by a trace of the same step without weights (`whet_fsdp2.trace`), extrapolated from few layers; of megatron
by formulas (`whet_megatron.forecast`), for each pipeline stage. Measured: by the worker itself (`memory/backend.*`), in
its second step, in processes of their own, which are forked from one that has imported all and computed nothing. glibc
gives freed memory back at once (M_MMAP_THRESHOLD), so that the peak is of live tensors and not of its caches.
"""

import argparse
import ctypes
import importlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

SEQUENCE: Final = 512
"""Tokens of the longest sequence."""
PHASES: Final = ("train", "optimizer")
M_MMAP_THRESHOLD: Final = -3
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "hidden_size": 640,
         "num_hidden_layers": 10, "vocab_size": 16000}  # fmt: skip
MOE = {**QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 384,
       "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "decoder_sparse_step": 1,
       "mlp_only_layers": [], "norm_topk_prob": True}  # fmt: skip
CHECKPOINTING = {"gradient_checkpointing": True}


class Configuration(NamedTuple):
    """A model and how it is trained."""

    name: str
    config: Mapping[str, Any]
    """The model's `config.json`."""
    section: Mapping[str, Any]
    """The section `backend`."""
    ranks: int = 1
    tokens: int = 1024
    """Tokens of one pass of a rank."""
    dtype: str = "float32"
    backend: str = "fsdp2"
    passes: int = 1
    """Forward and backward passes of a step."""


TWELVE = [
    Configuration("llama 66M", LLAMA, {}),
    Configuration("llama 66M, checkpointing", LLAMA, CHECKPOINTING, tokens=2048),
    Configuration("llama 66M, long pass", LLAMA, {}, tokens=2048),
    Configuration("llama 66M, LoRA of rank 16", LLAMA, {"lora": {"rank": 16}}),
    Configuration("llama 66M", LLAMA, {}, 2),
    Configuration("llama 66M, checkpointing", LLAMA, CHECKPOINTING, 2, 2048),
    Configuration("qwen2 49M tied", QWEN2, {}),
    Configuration("qwen2 49M tied, padded", QWEN2, {"layout": "padded"}),
    Configuration("qwen3 68M, LoRA of rank 64", QWEN3, {**CHECKPOINTING, "lora": {"rank": 64}}, tokens=1536),
    Configuration("qwen3 68M, bfloat16", QWEN3, {}, tokens=2048, dtype="bfloat16"),
    Configuration("qwen3_moe 70M", MOE, {}),
    Configuration("qwen3_moe 70M, LoRA with experts", MOE, {"lora": {"rank": 32, "experts": True}}, 2),
]
HALF = {**LLAMA, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 6, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 16000}  # fmt: skip
HALF_MOE = {**MOE, "num_hidden_layers": 4, "num_experts": 16, "vocab_size": 8000}
SMALL = [
    Configuration("llama 23M", HALF, {}, tokens=512),
    Configuration("llama 23M, checkpointing", HALF, CHECKPOINTING, tokens=1024),
    Configuration("llama 23M, LoRA of rank 16", HALF, {"lora": {"rank": 16}}, tokens=1024),
    Configuration("qwen3_moe 28M", HALF_MOE, {}, tokens=512),
    Configuration("llama 23M", HALF, {}, 2, 512),
    Configuration("llama 17M tied", {**HALF, "tie_word_embeddings": True}, {}, 2, 512),
]
LAYOUTS = [
    Configuration("llama 66M, tensor 2", LLAMA, {"parallel": {"tensor": 2}}, 2),
    Configuration("llama 66M, tensor 2, bfloat16", LLAMA, {"parallel": {"tensor": 2}}, 2, dtype="bfloat16"),
    Configuration("qwen2 49M tied", QWEN2, {}, 2),
    Configuration("qwen2 49M tied, tensor 2", QWEN2, {"parallel": {"tensor": 2}}, 2),
    Configuration("llama 66M, context 2", LLAMA, {"parallel": {"context": 2}}, 2, 2048),
    Configuration("llama 66M, two copies", LLAMA, {"parallel": {"replicate": 2}}, 2),
    Configuration("qwen3_moe 70M, expert 2", MOE, {"parallel": {"expert": 2}}, 2),
]


def of_megatron(name: str, config: Mapping[str, Any], ranks: int = 1, passes: int = 1, **section: Any) -> Configuration:
    """Return a configuration of the backend megatron, whose section may have `tokens` and `dtype` beside its keys."""
    tokens, dtype = section.pop("tokens", 1024), section.pop("dtype", "float32")
    return Configuration(f"megatron {name}", config, section, ranks, tokens, dtype, "megatron", passes)


TENSOR = {"tensor": 2, "sequence": True}
MEGATRON = [
    of_megatron("llama", LLAMA),
    of_megatron("llama, bfloat16", LLAMA, dtype="bfloat16"),
    of_megatron("llama, checkpointing", LLAMA, tokens=2048, **CHECKPOINTING),
    of_megatron("llama, selective", LLAMA, tokens=2048, gradient_checkpointing="selective"),
    of_megatron("llama, data 2", LLAMA, 2),
    of_megatron("llama, tensor 2", LLAMA, 2, parallel={"tensor": 2}),
    of_megatron("llama, tensor 2, sequence", LLAMA, 2, tokens=2048, parallel=TENSOR),
    of_megatron("llama, context 2", LLAMA, 2, tokens=2048, parallel={"context": 2}),
    of_megatron("llama, pipeline 2", LLAMA, 2, 4, parallel={"pipeline": 2}),
    of_megatron("llama, pipeline 2, bfloat16", LLAMA, 2, 4, dtype="bfloat16", parallel={"pipeline": 2}),
    of_megatron("llama, pipeline 2, checkpointing", LLAMA, 2, 4, parallel={"pipeline": 2}, **CHECKPOINTING),
    of_megatron("qwen2 tied, pipeline 2, virtual 2", QWEN2, 2, 4, parallel={"pipeline": 2, "virtual": 2}),
    of_megatron("llama, pipeline 4", LLAMA, 4, 6, parallel={"pipeline": 4}),
    of_megatron("qwen3_moe", MOE),
    of_megatron("qwen3_moe, expert 2", MOE, 2, parallel={"expert": 2}),
    of_megatron("llama, LoRA of rank 16", LLAMA, lora={"rank": 16}),
    of_megatron("llama, LoRA of rank 64, tensor 2", LLAMA, 2, tokens=2048, parallel=TENSOR, lora={"rank": 64}),
    of_megatron("llama, LoRA, bfloat16", LLAMA, 2, 4, dtype="bfloat16", parallel={"pipeline": 2}, lora={"rank": 16}),
    of_megatron("qwen3, LoRA, checkpointing", QWEN3, tokens=2048, **CHECKPOINTING, lora={"rank": 32}),
    of_megatron("qwen3_moe, LoRA", MOE, lora={"rank": 16}),
]
SMALL_MEGATRON = [
    of_megatron("llama, tensor 2, sequence", HALF, 2, tokens=1024, parallel=TENSOR),
    of_megatron("llama, pipeline 2", HALF, 2, 3, parallel={"pipeline": 2}),
    of_megatron("llama, LoRA of rank 16", HALF, lora={"rank": 16}),
]


def main() -> None:
    """Print a line for each configuration and phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of configurations, from 0")
    parser.add_argument("--small", action="store_true", help="small configurations")
    parser.add_argument("--layouts", action="store_true", help="kinds of parallelism")
    parser.add_argument("--megatron", action="store_true", help="the backend megatron; with --small: two small ones")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    configurations = SMALL if given.small else LAYOUTS if given.layouts else TWELVE
    if given.megatron:
        configurations = SMALL_MEGATRON if given.small else MEGATRON
    _import_all(configurations)
    rows, worst = [], 0.0
    if not given.json:
        head = f"{'configuration':50}{'ranks':>6}{'tokens':>8}  {'phase':10}"
        print(f"{head}{'predicted':>11}{'measured':>11}{'error':>8}")
    for one in configurations if given.only is None else [configurations[number] for number in given.only]:
        pairs = list(zip(forked(predicted, one), measured(one), strict=True))
        for stage, (expected, found) in enumerate(pairs):
            name = f"{one.name} [{stage}]" if len(pairs) > 1 else one.name
            for phase in PHASES:
                error = expected[phase] / found[phase] - 1
                worst = max(worst, abs(error))
                rows.append((name, one.ranks, phase, expected[phase], found[phase]))
                sizes = f"{expected[phase] / 2**20:9,.0f} M{found[phase] / 2**20:9,.0f} M"
                if not given.json:
                    print(f"{name:50}{one.ranks:6}{one.tokens:8}  {phase:10}{sizes}{error:+8.1%}", flush=True)
    print(json.dumps(rows) if given.json else f"largest error: {worst:.1%}")


def _import_all(configurations: list[Configuration]) -> None:
    """Import what workers import before they build anything."""
    from whet.data.model_info import ModelInfo
    from whet_fsdp2.config import Fsdp2Config, facts

    for config in (one.config for one in configurations if one.backend == "fsdp2"):
        for module in facts(Fsdp2Config(), ModelInfo("", config)).imports:
            importlib.import_module(module)
    if any(one.backend == "megatron" for one in configurations):
        importlib.import_module("whet_megatron.worker")
    for module in ("transformers", "whet_fsdp2.trace", "backend_step"):
        importlib.import_module(module)


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own."""
    return _start(function, *arguments)()


def _start(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Start a function in a forked process. Returns a function that waits for its result."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
        there.send(function(*arguments))

    process = context.Process(target=run)
    process.start()
    there.close()

    def result() -> Any:
        found = here.recv()  # EOFError: the process has died, and printed why
        process.join()
        return found

    return result


def predicted(one: Configuration) -> list[dict[str, int]]:
    """Return the bytes of each phase on one rank of each pipeline stage."""
    from whet.data.model_info import ModelInfo

    return (_of_megatron if one.backend == "megatron" else _traced)(one, ModelInfo("", one.config, one.dtype))


def _traced(one: Configuration, model: Any) -> list[dict[str, int]]:
    import attrs

    from whet.config.structure import structure
    from whet_fsdp2.config import Fsdp2Config, sizes
    from whet_fsdp2.trace import trace
    from whet_memory.case import Case
    from whet_memory.tracing import traced

    config = structure(dict(one.section), Fsdp2Config, None)
    found = traced(
        trace, Case(attrs.asdict(config), model, sizes(config, one.ranks), tokens=one.tokens, longest=SEQUENCE)
    )
    return [{"train": max(found["forward"], found["backward"]), "optimizer": found["optimizer"]}]


def _of_megatron(one: Configuration, model: Any) -> list[dict[str, int]]:
    import attrs

    from whet.config.structure import structure
    from whet_megatron.config import MegatronConfig
    from whet_megatron.forecast import formulas, sizes_of
    from whet_memory.case import Case

    config = structure(dict(one.section), MegatronConfig, None)
    case = Case(
        attrs.asdict(config), model, sizes_of(config, one.ranks), tokens=one.tokens, longest=SEQUENCE, passes=one.passes
    )
    found = [formulas(attrs.evolve(case, stage=stage)) for stage in range(case.sizes.pipeline)]
    return [{phase: peaks[phase].device for phase in PHASES} for peaks in found]


def measured(one: Configuration) -> list[dict[str, float]]:
    """Return the most bytes of a rank of each pipeline stage, in each phase of its second step."""
    with tempfile.TemporaryDirectory() as folder:
        forked(_make, one, Path(folder))
        answers = [result() for result in [_start(_train, one, Path(folder), rank) for rank in range(one.ranks)]]
    each = one.ranks // one.section.get("parallel", {}).get("pipeline", 1)
    return [
        {phase: max(answer[phase] for answer in answers[first : first + each]) for phase in PHASES}
        for first in range(0, one.ranks, each)
    ]


def _make(one: Configuration, folder: Path) -> None:
    """Write the model, in float32."""
    import torch
    import transformers

    settings = transformers.AutoConfig.for_model(**one.config)
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(folder / "model")


def _train(one: Configuration, folder: Path, rank: int) -> dict[str, float]:
    """Take two steps as one rank, and return the peaks of the second: in the first there are no moments yet."""
    from whet.component import Spec
    from whet.data.batch import from_sequences
    from whet.data.model_info import read_model
    from whet.interfaces.workers import WorkerRank

    module = importlib.import_module(f"whet_{one.backend}.worker")
    worker = module.Worker(
        rank=WorkerRank("backend", rank, one.ranks, threads=1, rendezvous=f"file://{folder}/meet"),
        config={**one.section, "micro_batch_tokens": one.tokens},
        model=read_model(folder / "model", one.dtype),
        scratch=str(folder),
    )
    shard = worker.coordinates()
    draw = np.random.Generator(np.random.Philox(shard.data))
    rows = [
        {"tokens": draw.integers(one.config["vocab_size"], size=SEQUENCE + 1), "loss_mask": np.arange(SEQUENCE + 1) > 0}
        for _ in range(one.passes * one.tokens // SEQUENCE)
    ]
    batch = from_sequences(rows, prompt_lengths=[1] * len(rows))
    batch = batch.with_columns(
        advantages=np.ones(batch.sequences, np.float32), old_logprobs=np.zeros(batch.tokens, np.float32)
    )
    owns = (shard.tensor, shard.context, shard.pipeline) == (0, 0, 0)
    for _ in range(2):
        found = worker.train(batch if owns else None, Spec("backend_step:PolicyGradient"))
    return {phase: found[f"memory/backend.{phase}"].number() * 2**30 for phase in PHASES}


if __name__ == "__main__":
    main()
