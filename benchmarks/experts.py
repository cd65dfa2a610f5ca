"""Measure the experts of one layer, forward and backward with frozen weights, beside those of `transformers`.

    python benchmarks/experts.py                  the layer of Qwen3-30B-A3B on a GPU, a small one on a CPU

Each line: tokens, milliseconds of both, and the ratio whet / transformers. 1 is equal, below 1 is faster.
"""

import statistics
import time
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from whet_fsdp2.sorted_experts import compute_experts

LARGE = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
SMALL = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}


def main() -> None:
    """Print a line for each number of tokens."""
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda:0", torch.bfloat16) if gpu else ("cpu", torch.float32)
    config = Qwen3MoeConfig(**(LARGE if gpu else SMALL))
    experts: Any = Qwen3MoeExperts(config).to(device, dtype).requires_grad_(False)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    for tokens in (2048, 16_384) if gpu else (512, 2048):
        hidden = torch.randn(tokens, config.hidden_size, device=device, dtype=dtype, requires_grad=True)
        scores = torch.randn(tokens, config.num_experts, device=device, dtype=dtype).softmax(-1)
        weights, chosen = scores.topk(config.num_experts_per_tok, -1)
        times: dict[Any, list[float]] = {grouped_mm_experts_forward: [], compute_experts: []}
        for _ in range(8):
            for forward, taken in times.items():
                begin = _clock(gpu)
                torch.autograd.backward(forward(experts, hidden, chosen, weights).sum())
                taken.append(_clock(gpu) - begin)
        theirs, ours = (1e3 * statistics.median(taken[2:]) for taken in times.values())
        print(f"{tokens} tokens: whet {ours:.2f} ms, transformers {theirs:.2f} ms, ratio {ours / theirs:.2f}")


def _clock(gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
