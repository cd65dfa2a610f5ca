"""Peak memory of each process while a model is loaded and saved on two ranks, as a share of the whole model.

    python benchmarks/sharded_memory.py --gib 2

A random model of that size in float32 is written to a temporary folder. Each rank samples its anonymous memory (pages
of mapped files are not counted, the kernel can drop them) every few milliseconds while it loads its part, takes one
step, and saves weights and moments. The figure of a phase is the peak above what the process held before the model,
and while saving above what it held before saving.
"""

import argparse
import multiprocessing
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYER = 1024, 16 * 1024 * 1024  # parameters of a layer: 4 H^2 of attention and 12 H^2 of its network


class Peak:
    """The largest anonymous memory of this process while the context is open."""

    def __enter__(self) -> "Peak":
        self.before = self.most = anonymous()
        self._open = True
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while self._open:
            self.most = max(self.most, anonymous())
            time.sleep(0.003)

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()
        self.most = max(self.most, anonymous())

    @property
    def grown(self) -> int:
        """Return the bytes above those at the beginning."""
        return self.most - self.before


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def write_model(folder: Path, gib: float) -> int:
    """Write a random model of about so many GiB. Return the bytes of its weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    layers = max(1, round(gib * 2**30 / 4 / LAYER))
    config = Qwen3Config(
        vocab_size=1024, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16,
        head_dim=64, intermediate_size=4 * HIDDEN, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="500MB")
    return sum(p.numel() * 4 for p in model.parameters())


def rank_main(rank: int, folder: str, saved: str, meeting: str, sizes: dict[str, int], found: Any) -> None:
    """Load, take a step and save as one rank, and report both peaks."""
    import torch

    from whet.component import Spec
    from whet.data.batch import from_sequences
    from whet.data.model_info import read_model
    from whet.interfaces.workers import WorkerRank
    from whet_fsdp2.worker import Worker

    with Peak() as loading:
        model = read_model(folder)
        place = WorkerRank("backend", rank, 2, rendezvous=meeting)
        worker = Worker(place, {"parallel": sizes}, model, total_steps=1, scratch="")
    tokens = np.random.default_rng(rank).integers(1024, size=64)
    batch = from_sequences([{"tokens": tokens, "loss_mask": np.arange(64) > 8}], prompt_lengths=[8], group=[0])
    worker.train(batch if worker._ranks.owns_shard else None, Spec("whet_testing.losses:Likelihood"))
    with Peak() as saving:
        worker.save(saved)
    torch.distributed.barrier()
    found.put((rank, loading.grown, saving.grown))
    worker.close()


def measure(folder: Path, whole: int, sizes: dict[str, int]) -> None:
    """Run two ranks with these sizes of `parallel`, and print their peaks."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    found = context.Queue()
    with tempfile.TemporaryDirectory() as saved:
        arguments = [(rank, str(folder), saved, meeting, sizes, found) for rank in range(2)]
        ranks = [context.Process(target=rank_main, args=one) for one in arguments]
        for rank in ranks:
            rank.start()
        rows = sorted(found.get(timeout=580) for _ in ranks)
        for rank in ranks:
            rank.join()
    for number, loading, saving in rows:
        print(f"{sizes or 'fsdp 2'!s:16} rank {number}: loading {loading / whole:.2f}, saving {saving / whole:.2f} of "
              f"the model's {whole / 2**30:.2f} GiB", flush=True)  # fmt: skip


def main() -> None:
    """Measure FSDP2 and tensor parallelism."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            whole = pool.apply(write_model, (Path(folder), options.gib))
        for sizes in ({}, {"tensor": 2}):
            measure(Path(folder), whole, sizes)


if __name__ == "__main__":
    main()
