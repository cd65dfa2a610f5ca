"""Measure what rows of few lengths save under tensor parallelism: PyTorch plans each operator anew for each length.

    python benchmarks/tensor_rows.py

One process is rank 0 of two, whose collectives return at once. So the seconds are those of a rank without its waiting.
The two ways take turns, each with rows that it has not seen; the first row of each is not counted.
"""

import argparse
import statistics
import tempfile
import time

import attrs
import numpy as np
import torch

from whet.config.structure import structure
from whet.data.batch import from_sequences
from whet.data.model_info import read_model
from whet.interfaces.workers import WorkerRank
from whet_fsdp2 import attention, trace
from whet_fsdp2.config import Fsdp2Config, sizes
from whet_fsdp2.feed import EXACT, Widths, feed, widths
from whet_fsdp2.ranks import Ranks
from whet_fsdp2.root import AnyRoot
from whet_memory.case import Case
from whet_memory.live_bytes import fake_ranks
from whet_start.small_models import make_model, make_tokenizer

TOKENS = 1024


def seconds(root: AnyRoot, length: int, allowed: Widths) -> float:
    """Return the seconds of a forward and a backward pass over a row of one sequence."""
    row = {"tokens": np.arange(length) % 20, "loss_mask": np.arange(length) >= length // 4}
    one = feed(from_sequences([row], prompt_lengths=[1]), "packed", torch.device("cpu"), None, allowed)
    begin = time.perf_counter()
    root(one, ("logprobs",))["logprobs"].sum().backward()
    return time.perf_counter() - begin


def main() -> None:
    """Print the medians of both ways and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60, help="rows of each way")
    count = parser.parse_args().rows
    document = {"micro_batch_tokens": TOKENS, "parallel": {"tensor": 2}, "layout": "packed"}
    config = structure(document, Fsdp2Config, None)
    attention.register()
    draw = np.random.default_rng(0)
    lengths = draw.permutation(np.arange(TOKENS // 2, TOKENS))[: 2 * count].tolist()
    with tempfile.TemporaryDirectory() as folder, fake_ranks(2):
        make_model(folder, make_tokenizer(["0 1 2 3 4 5 6 7 8 9 + - = a b c"]))
        case = Case(attrs.asdict(config), read_model(folder, "float32"), sizes(config, 2), tokens=TOKENS)
        root, _ = trace._build(case, config, Ranks(WorkerRank("backend", 0, 2), config.parallel), trained=True)
        trace._allocate(root.model)
        ways = {"any length": EXACT, "few lengths": widths(config)}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for i, length in enumerate(lengths):
            name = list(ways)[i % 2]
            found[name].append(seconds(root, length, ways[name]))
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    for name, median in medians.items():
        print(f"{name:12} {1000 * median:7.1f} ms a row of {TOKENS // 2} to {TOKENS} tokens")
    print(f"ratio        {medians['few lengths'] / medians['any length']:7.2f}")


if __name__ == "__main__":
    main()
