"""Tokens per second of the `hf` generator against `transformers`' own `generate`, for the same requests in one run.

    python benchmarks/generator_decode.py                 # a model of 0.9 M parameters, 16 prompts x 8 samples x 32
    python benchmarks/generator_decode.py --ending 0.08   # each token ends its sequence with this probability
    python benchmarks/generator_decode.py --hidden 512 --layers 8 --threads 1
    python benchmarks/generator_decode.py --turns 8 --max-tokens 4 --prompts 8      # a conversation that goes on

`generate` gives no logprobs and decodes one batch; the generator is measured with everything around it: dispatch,
the wire's encoding, prompts, sampling, logprobs. Both take turns, so that a busy machine slows both; the ratio is of
the best rounds. Processor seconds hold up where wall seconds do not.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from whet.data.records import Request, Sampling
from whet.runtime.inline import InlineWorkerGroup
from whet_hf.config import HfConfig
from whet_hf.generator import HfGenerator
from whet_start.small_models import make_model, make_tokenizer
from whet_testing.role_context import make_context


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=21)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=1, help="how often each sequence goes on after its completion")
    parser.add_argument("--answer-tokens", type=int, default=23, help="tokens between two turns")
    parser.add_argument("--ending", type=float, default=0.0, help="share of the vocabulary that ends a sequence")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--decoder", choices=("auto", "plain"), default="auto")
    options = parser.parse_args()
    if options.turns > 1 and options.ending:
        parser.error("--turns wants completions of one length: leave out --ending")
    return options


def main() -> None:
    """Measure both and print the ratio."""
    options = arguments()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(
            Path(folder) / "model", make_tokenizer(["Compute 7+8-3."]), hidden=options.hidden, layers=options.layers,
            heads=options.heads, kv_heads=options.kv_heads, head_dim=max(16, options.hidden // options.heads),
        )  # fmt: skip
        context = make_context(
            Path(folder), "generator", model, InlineWorkerGroup("generator", threads=options.threads)
        )
        generator = HfGenerator(HfConfig(decoder=options.decoder, prefix_caching=options.turns > 1), context)
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        torch.set_num_threads(options.threads)
        rng = np.random.default_rng(0)
        prompts = rng.integers(3, 300, (options.prompts, options.prompt_tokens))
        stops = [int(token) for token in range(3, 3 + round(options.ending * reference.config.vocab_size))]
        contenders: dict[str, Callable[[int], int]] = {
            "whet": lambda seed: ours(generator, prompts, stops, options, seed),
            "transformers": lambda seed: theirs(reference, prompts, stops, options, seed),
        }
        rounds: dict[str, list[tuple[float, float, int]]] = {name: [] for name in contenders}
        for seed in range(-1, options.rounds):
            for name, run in contenders.items():
                result = measured(run, seed + 1)
                if seed >= 0:  # the first round warms up
                    rounds[name].append(result)
        report(rounds, options)
        generator.close()


def ours(generator: HfGenerator, prompts: Any, stops: list[int], options: argparse.Namespace, seed: int) -> int:
    """Generate with whet -> number of tokens."""
    sampling = Sampling(options.max_tokens, stop_tokens=tuple(stops))

    async def together() -> int:
        tokens = 0
        histories = [prompt for prompt in prompts for _ in range(options.samples)]
        for turn in range(options.turns):
            requests = [
                Request(
                    f"{i}.{turn}", history, sampling, (seed * 1000 + turn) * 10**6 + i,
                    prefix="" if turn else str(i // options.samples),
                )
                for i, history in enumerate(histories)
            ]  # fmt: skip
            completions = await asyncio.gather(*map(generator.generate, requests))
            tokens += sum(len(completion.tokens) for completion in completions)
            answers = answers_of(len(histories), turn, options)
            parts = zip(histories, completions, answers, strict=True)
            histories = [np.concatenate([history, one.tokens, answer]) for history, one, answer in parts]
        return tokens

    return asyncio.run(together())


def answers_of(rows: int, turn: int, options: argparse.Namespace) -> Any:
    """Return what stands between two turns [rows, answer tokens]."""
    return np.random.default_rng(turn).integers(3, 300, (rows, options.answer_tokens))


@torch.inference_mode()
def theirs(model: Any, prompts: Any, stops: list[int], options: argparse.Namespace, seed: int) -> int:
    """Generate with transformers, each turn from its first token on -> number of tokens up to the first stop."""
    torch.manual_seed(seed)
    ids, tokens = torch.from_numpy(prompts), 0
    for turn in range(options.turns):
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=options.max_tokens, num_return_sequences=1 if turn else options.samples,
            eos_token_id=stops or [10**9], pad_token_id=0,
        )  # fmt: skip
        out = whole[:, ids.shape[1] :]
        ended = torch.isin(out, torch.tensor(stops, dtype=torch.int64)).cumsum(1)
        tokens += int((torch.nn.functional.pad(ended, (1, -1)) == 0).sum())
        ids = torch.cat([whole, torch.from_numpy(answers_of(len(whole), turn, options))], 1)
    return tokens


def measured(run: Callable[[int], int], seed: int) -> tuple[float, float, int]:
    """Run once -> (wall seconds, processor seconds, tokens)."""
    wall, work = time.perf_counter(), time.process_time()
    tokens = run(seed)
    return time.perf_counter() - wall, time.process_time() - work, tokens


def report(rounds: dict[str, list[tuple[float, float, int]]], options: argparse.Namespace) -> None:
    """Print a line for each contender, and the ratios."""
    print(f"{options.prompts} prompts x {options.samples} samples, {options.threads} threads, {options.rounds} rounds")
    best = {}
    for name, results in rounds.items():
        wall = [tokens / seconds for seconds, _, tokens in results]
        work = [tokens / seconds for _, seconds, tokens in results]
        best[name] = max(wall), max(work)
        length = statistics.mean(tokens for _, _, tokens in results) / (options.prompts * options.samples)
        print(
            f"{name:12}  tokens/s best {max(wall):7.0f}  median {statistics.median(wall):7.0f}   "
            f"per processor second {max(work):7.0f}   best round {min(r[0] for r in results) * 1e3:5.0f} ms   "
            f"mean length {length:.1f}"
        )
    (whet_wall, whet_work), (their_wall, their_work) = best["whet"], best["transformers"]
    print(f"ratio         {whet_wall / their_wall:.2f} in wall time, {whet_work / their_work:.2f} in processor time")


if __name__ == "__main__":
    main()
