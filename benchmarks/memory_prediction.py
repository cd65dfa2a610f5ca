"""Compare the predicted peak of memory of a training step with the measured one, on a CPU.

    python benchmarks/memory_prediction.py                 twelve configurations
    python benchmarks/memory_prediction.py --only 0 5      some of them

Predicted: by a trace of the same step without weights (`whet_fsdp2.trace`), extrapolated from few layers. Measured: by
the worker itself (`memory/backend.*`), in its third step, in processes of their own. glibc gives freed memory back at
once (MALLOC_MMAP_THRESHOLD_=65536), so that the peak is of live tensors and not of its caches.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = {**SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
QWEN3 = {**SMALL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "hidden_size": 640,
         "num_hidden_layers": 10, "vocab_size": 16000}  # fmt: skip
MOE = {**QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 384,
       "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "decoder_sparse_step": 1,
       "mlp_only_layers": [], "norm_topk_prob": True}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, int, int]] = [
    ("llama 66M", SMALL, {}, "float32", 1, 1024),
    ("llama 66M, checkpointing", SMALL, {"gradient_checkpointing": True}, "float32", 1, 2048),
    ("llama 66M, long pass", SMALL, {}, "float32", 1, 2048),
    ("llama 66M, whole logits", SMALL, {"logprob_chunk": 1024}, "float32", 1, 1024),
    ("llama 66M", SMALL, {}, "float32", 2, 1024),
    ("llama 66M, checkpointing", SMALL, {"gradient_checkpointing": True}, "float32", 2, 2048),
    ("qwen2 49M tied", QWEN2, {}, "float32", 1, 1024),
    ("qwen2 49M tied, padded", QWEN2, {"layout": "padded"}, "float32", 1, 1024),
    ("qwen3 58M", QWEN3, {}, "float32", 1, 1536),
    ("qwen3 58M, bfloat16", QWEN3, {}, "bfloat16", 1, 2048),
    ("qwen3_moe 70M", MOE, {}, "float32", 1, 1024),
    ("qwen3_moe 70M, checkpointing", MOE, {"gradient_checkpointing": True}, "float32", 2, 1024),
]
"""Name, config.json, section, dtype, ranks, tokens of a pass."""
PHASES = ("train", "optimizer")


def main() -> None:
    """Print a line for each configuration and phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", default=range(len(CASES)), help="numbers of configurations")
    worst = 0.0
    print(f"{'configuration':34}{'ranks':>6}{'tokens':>8}  {'phase':10}{'predicted':>10}{'measured':>10}{'error':>8}")
    for number in parser.parse_args().only:
        name, _, _, _, ranks, tokens = CASES[number]
        expected, found = predicted(number), measured(number)
        for phase in PHASES:
            error = expected[phase] / found[phase] - 1
            worst = max(worst, abs(error))
            sizes = f"{expected[phase] / 2**20:8,.0f} M{found[phase] / 2**20:8,.0f} M"
            print(f"{name:34}{ranks:6}{tokens:8}  {phase:10}{sizes}{error:+8.1%}", flush=True)
    print(f"largest error: {worst:.1%}")


def predicted(number: int) -> dict[str, int]:
    """Return the traced bytes of each phase on one rank."""
    import attrs

    from whet.data.model_info import ModelInfo
    from whet_fsdp2.config import Fsdp2Config
    from whet_memory.case import Case, Sizes
    from whet_memory.tracer import Tracer

    _, config, section, dtype, ranks, tokens = CASES[number]
    settings = attrs.asdict(Fsdp2Config(**section))
    case = Case(settings, ModelInfo("", config, dtype), Sizes(ranks), tokens=tokens, longest=512)
    with Tracer(sys.executable, use_cache=False, seconds=900) as tracer:
        peaks = tracer.peaks("whet_fsdp2.trace:trace", case)
    return {phase: peak.device for phase, peak in peaks.items()}


def measured(number: int) -> dict[str, float]:
    """Return the most bytes of a rank in each phase of its third step."""
    ranks = CASES[number][4]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", str(number), folder]
        subprocess.run([*command, "make"], check=True, env=environment, stderr=subprocess.DEVNULL)
        workers = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE) for rank in range(ranks)
        ]
        answers = [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]
    return {phase: max(answer[phase] for answer in answers) for phase in PHASES}


def worker(number: int, folder: Path, rank: str) -> None:
    """Write the model of a configuration, or take three steps as one rank of it and print the peaks of the third."""
    import numpy as np
    import torch
    import transformers

    from whet.component import Spec
    from whet.data.batch import from_sequences
    from whet.data.model_info import read_model
    from whet.interfaces.workers import WorkerRank
    from whet_fsdp2.config import Fsdp2Config, facts
    from whet_fsdp2.worker import Worker

    _, config, section, dtype, ranks, tokens = CASES[number]
    if rank == "make":
        settings = transformers.AutoConfig.for_model(**config)
        transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(folder / "model")
        return
    sys.path.insert(0, str(Path(__file__).parent))
    model = read_model(folder / "model", dtype)
    for module in facts(Fsdp2Config(), model).imports:  # as a worker process does before it builds anything
        importlib.import_module(module)
    one = Worker(
        rank=WorkerRank("backend", int(rank), ranks, threads=1, rendezvous=f"file://{folder}/meet"),
        config={**section, "micro_batch_tokens": tokens},
        model=model,
        scratch=str(folder),
    )
    draw = np.random.Generator(np.random.Philox(int(rank)))
    rows = [
        {"tokens": draw.integers(config["vocab_size"], size=513), "loss_mask": np.arange(513) >= 1}
        for _ in range(tokens // 512)
    ]
    batch = from_sequences(rows, prompt_lengths=[1] * len(rows))
    batch = batch.with_columns(
        advantages=np.ones(batch.sequences, np.float32), old_logprobs=np.zeros(batch.tokens, np.float32)
    )
    for _ in range(3):
        found = one.train(batch, Spec("backend_step:PolicyGradient"))
    print(json.dumps({phase: found[f"memory/backend.{phase}"].number() * 2**30 for phase in PHASES}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        main()
