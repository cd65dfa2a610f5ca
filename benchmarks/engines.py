"""What an engine loses on the way through whet, as ratios of one run on one machine.

    nox -s 'bench-engines(vllm)'                          by hand against whet, a weight sync against a copy, a step
    nox -s 'bench-engines(sglang)' -- --rounds 8          fewer: single rounds differ by a quarter, and more
    python benchmarks/engines.py vllm --hidden 512 --layers 8 --no-step

By hand: the engine's own asynchronous interface in this process, with the same arguments and the same requests.
Through whet: the generator as in a run, its worker in a process of its own. Both stand beside each other and take
turns, so that a busy machine slows both; ratios are within a round. Processor seconds are of all processes together.

A weight sync is from the beginning of the sending, in this process, to the moment at which the engine may go on: bytes
into shared memory, checksums, the engine's own loading. The copy is of the same tensors, in this process.

A step is one of GRPO against TRL's GRPOTrainer on the same model, problems and sizes; TRL samples with vLLM if that
runs here, else with transformers.
"""

import argparse
import asyncio
import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo_step import ours, prepare, trl
from transformers import AutoModelForCausalLM

from whet.component import resolve
from whet.config.sections import DeadlinesSection
from whet.data.records import Request, Sampling
from whet.interfaces.weights import TransferSpec
from whet.runtime.local import LocalCluster
from whet_start.small_models import make_model, make_tokenizer
from whet_testing.processes import descendants
from whet_testing.role_context import make_context
from whet_weights.transfer import send

TICKS = os.sysconf("SC_CLK_TCK")
ENGINES = re.compile("VLLM::|sglang::")
"""How engines name the processes that compute."""
CONFIGS = {"vllm": "whet_vllm.config:VllmConfig", "sglang": "whet_sglang.config:SglangConfig"}
GENERATORS = {"vllm": "whet_vllm.generator:VllmGenerator", "sglang": "whet_sglang.generator:SglangGenerator"}
Generate = Callable[[list[Request]], Coroutine[Any, Any, int]]
"""Have requests served, and give the number of tokens."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3, help="steps at the beginning that are left out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-step", action="store_true", help="leave out the step")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = arguments()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        engine(options, Path(folder))
    gc.collect()  # else vLLM ends itself once more when the interpreter has half gone
    if not options.no_step:
        step(options)


def engine(options: argparse.Namespace, folder: Path) -> None:
    """Measure requests and weight syncs."""
    model = make_model(
        folder / "model", make_tokenizer(["Compute 7+8-3."]), hidden=options.hidden, layers=options.layers,
        heads=options.hidden // 64, kv_heads=options.hidden // 64, head_dim=64, max_positions=1024,
    )  # fmt: skip
    config = resolve(CONFIGS[options.engine])(cache_gib=0.5)
    with LocalCluster(folder, DeadlinesSection(start=1800.0)) as cluster, asyncio.Runner() as runner:
        context = make_context(
            folder, "generator", model, cluster.worker_group("generator", threads=options.threads), max_context=512
        )
        generator = resolve(GENERATORS[options.engine])(config, context)
        generate, close = {"vllm": vllm_by_hand, "sglang": sglang_by_hand}[options.engine](config, context, runner)

        async def through(requests: list[Request]) -> int:
            completions = await asyncio.gather(*map(generator.generate, requests))
            return sum(len(completion.tokens) for completion in completions)

        requests(options, runner, {"by hand": generate, "whet": through})
        sync(options, generator, model, folder)
        close()
        generator.close()


def vllm_by_hand(config: Any, context: Any, runner: asyncio.Runner) -> tuple[Generate, Callable[[], None]]:
    """Start vLLM in this process as its documentation has it."""
    from whet_vllm.arguments import engine_arguments
    from whet_vllm.engine import QUIET

    spawning = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}  # this process has threads
    os.environ |= {**QUIET, **spawning, "TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    chosen = {
        name: value for name, value in engine_arguments(config, context, "cpu").items() if "extension" not in name
    }

    async def begin() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**chosen))

    llm = runner.run(begin())

    async def one(request: Request) -> int:
        sampling = SamplingParams(
            temperature=1.0, seed=request.seed, max_tokens=request.sampling.max_tokens, ignore_eos=True, logprobs=0,
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        last: Any = None
        async for output in llm.generate({"prompt_token_ids": request.tokens.tolist()}, sampling, request.id):
            last = output
        (made,) = last.outputs
        return len([entry[token].logprob for entry, token in zip(made.logprobs, made.token_ids, strict=True)])

    async def generate(asked: list[Request]) -> int:
        return sum(await asyncio.gather(*map(one, asked)))

    return generate, llm.shutdown


def sglang_by_hand(config: Any, context: Any, runner: asyncio.Runner) -> tuple[Generate, Callable[[], None]]:
    """Start SGLang in this process as its documentation has it."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1"}
    from sglang import Engine

    from whet_sglang.arguments import engine_arguments

    chosen = engine_arguments(config, context, "cpu")
    llm = Engine(**{name: value for name, value in chosen.items() if name != "custom_weight_loader"})

    async def generate(asked: list[Request]) -> int:
        settings = [
            {"temperature": 1.0, "max_new_tokens": r.sampling.max_tokens, "ignore_eos": True, "sampling_seed": r.seed}
            for r in asked
        ]
        made = await llm.async_generate(
            input_ids=[r.tokens.tolist() for r in asked], sampling_params=settings, return_logprob=True
        )
        return sum(len(one["meta_info"]["output_token_logprobs"]) for one in made)

    return generate, llm.shutdown


def requests(options: argparse.Namespace, runner: asyncio.Runner, contenders: Mapping[str, Generate]) -> None:
    """Serve the same requests by each engine in turn, and print tokens per second."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    works: dict[str, list[float]] = {name: [] for name in contenders}
    around: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, options.rounds):
        order = list(contenders) if number % 2 else list(reversed(contenders))
        for name in order:
            asked = made_up(options, number + 1, name)
            wall, work = time.perf_counter(), processor_seconds()
            tokens = runner.run(contenders[name](asked))
            seconds, (busy, inside) = time.perf_counter() - wall, np.subtract(processor_seconds(), work)
            if number >= 0:  # the first round warms up
                rates[name].append(tokens / seconds)
                works[name].append(tokens / busy)
                around[name].append((busy - inside) / busy)
    sizes = f"{options.prompts} prompts x {options.samples} samples x {options.max_tokens} tokens"
    print(f"{sizes}, a model of {options.layers} layers of {options.hidden}, {options.rounds} rounds")
    for name in contenders:
        print(
            f"{name:10}  tokens/s {statistics.median(rates[name]):7.0f}   "
            f"per processor second {statistics.median(works[name]):7.0f}, "
            f"{statistics.median(around[name]):.1%} of that outside of the engine's own processes"
        )
    for what, found in (("wall", rates), ("processor", works)):
        ratios = [whet / hand for whet, hand in zip(found["whet"], found["by hand"], strict=True)]
        print(f"ratio of tokens per second of {what} time, whet over by hand: {spread(ratios)}")
    sys.stdout.flush()


def made_up(options: argparse.Namespace, number: int, name: str) -> list[Request]:
    """Make the requests of a round; no two rounds share a prompt, so none finds another's in the engine's cache."""
    rng = np.random.default_rng(number)
    sampling = Sampling(options.max_tokens)
    prompts = rng.integers(3, 300, (options.prompts, options.prompt_tokens))
    return [
        Request(f"{name}-{number}-{p}-{s}", prompt, sampling, number * 10**6 + p * 1000 + s, prefix=f"{number}-{p}")
        for p, prompt in enumerate(prompts)
        for s in range(options.samples)
    ]


def processor_seconds() -> tuple[float, float]:
    """Add up what this process and all that it started have computed, and of it the engines' own processes."""
    found = {os.getpid(): "this process", **{process.pid: process.command for process in descendants()}}
    seconds = {process: processor_seconds_of(process) for process in found}
    return sum(seconds.values()), sum(seconds[process] for process in found if ENGINES.search(found[process]))


def processor_seconds_of(process: int) -> float:
    """Read what a process has computed; 0 where it has just ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def sync(options: argparse.Namespace, generator: Any, model: Path, folder: Path) -> None:
    """Hand weights over and copy them in turn, and print seconds."""
    sender = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    weights = [(name, parameter.detach()) for name, parameter in sender.named_parameters()]
    size = sum(tensor.nbytes for _, tensor in weights)
    handed, copied = [], []
    for version in range(1, options.rounds + 3):
        spec = TransferSpec("shared-memory", str(folder / "weights"), f"{version}-0", version)
        begin = time.perf_counter()
        pending = generator.receive_weights(spec, version)
        send(spec, weights)
        pending.result()
        middle = time.perf_counter()
        copies = [tensor.clone() for _, tensor in weights]
        handed.append(middle - begin)
        copied.append(time.perf_counter() - middle)
        del copies
    ratios = [a / b for a, b in zip(handed[2:], copied[2:], strict=True)]
    print(
        f"weight sync of {size / 2**20:.1f} MiB: {1000 * statistics.median(handed[2:]):.1f} ms, a copy of them "
        f"{1000 * statistics.median(copied[2:]):.1f} ms: {spread(ratios)} times as long",
        flush=True,
    )


def step(options: argparse.Namespace) -> None:
    """Take steps of GRPO with the engine and with TRL in turn, and print the ratio."""
    prepare()
    peer = ["--vllm"] if options.engine == "vllm" else []
    if peer and (refused := why_not(options)):
        print(f"TRL with vLLM does not run here: {refused}")
        peer = []
    ratios = []
    for _ in range(max(1, options.rounds // 8)):
        rows, _ = ours(options, f"generator={{use: {options.engine}, cache_gib: 0.5}}")
        own = statistics.median(row["seconds/step"] for row in rows[options.skip :])
        ratios.append(own / statistics.median(trl(options, *peer)[0][options.skip :]))
    theirs = "with vLLM" if peer else "with transformers"
    print(f"a step of GRPO with {options.engine} over one of TRL {theirs}: {spread(ratios)}")


def why_not(options: argparse.Namespace) -> str:
    """Run two steps of TRL with vLLM. Return its error if it failed."""
    words = [sys.executable, str(Path(__file__).with_name("trl_grpo.py")), "runs/bench/sft/model", "--vllm"]
    words += ["--steps", "2", "--threads", str(options.threads)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"})
    said = [line for line in done.stderr.splitlines() if "Error: " in line]
    return (said or ["it said nothing"])[-1] if done.returncode else ""


def spread(ratios: list[float]) -> str:
    """Return the median with the least and the largest."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
