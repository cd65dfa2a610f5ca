"""Packed attention with one call of a flash kernel for sequences of any lengths. GPUs use it in bfloat16.

The queries of a row are as they lie. The keys of a completion are those of its prompt, then its own: they are copied
once for each completion, which is little with few key heads. The kernel aligns its causal mask to the last query and
the last key, so a query sees the whole prompt and its own past:

    row       p p p | q q | a a | b               lengths 3 2 2 1, prefix - - 0 0
    queries   p p p | q q | a a | b               cu_queries 0 3 5 7 8
    keys      p p p | q q | p p p a a | p p p b   cu_keys    0 3 5 10 14

    q of the second a sees p p p a a; with a window of 2 it sees a a

Which kernel: `varlen_attn` of torch 2.11 or later, else the package flash-attn. Both are FlashAttention 2 or later (Dao
2023, arXiv:2307.08691). Everything else, such as float32, is computed by `whet_fsdp2.portable`.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from whet_training.layout import Ints, ranges

HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
"""The largest size of a head in FlashAttention 2. It must be a multiple of 8."""


class Call(Protocol):
    """A kernel. Causal, aligned to the last query and the last key of each sequence."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_queries: Tensor, cu_keys: Tensor, most_queries: int, most_keys: int,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        """Return [T, heads, d]. q [T, heads, d], k and v [K, kv_heads, d]; `window`: keys that a query sees at most."""


@frozen
class Kernel:
    """A kernel and its name in logs."""

    name: str
    call: Call


@frozen(eq=False)
class VarlenPlan:
    """The sequences of a row."""

    cu_queries: Tensor
    """[S + 1] int32: where the queries of each segment begin, and the end."""
    cu_keys: Tensor
    """[S + 1] int32."""
    most_queries: int
    most_keys: int
    keys: Tensor | None
    """[K] the token of each key. None: the keys are as they lie."""


def plan_varlen(lengths: Ints, prefix: Ints, device: torch.device) -> VarlenPlan:
    """Return the sequences for segments of these lengths [S]. prefix [S]: the prefix segment of each segment, or -1."""
    place = np.cumsum(lengths) - lengths
    behind = np.where(prefix >= 0, lengths[prefix], 0)
    spans = behind + lengths

    def tensor(array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def ends(sizes: Ints) -> Tensor:
        return tensor(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))

    keys = None
    if behind.any():
        begin = np.stack([np.where(prefix >= 0, place[prefix], 0), place], 1).ravel()
        keys = tensor(ranges(begin, np.stack([behind, lengths], 1).ravel()))
    return VarlenPlan(ends(lengths), ends(spans), int(lengths.max()), int(spans.max()), keys)


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float, window: int | None, kernel: Kernel
) -> Tensor:
    """Return attention within the segments of a row: q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d]."""
    if plan.keys is not None:
        k, v = k.index_select(0, plan.keys), v.index_select(0, plan.keys)
    window = None if window is None or window >= plan.most_keys else window
    return kernel.call(
        q, k, v, plan.cu_queries, plan.cu_keys, plan.most_queries, plan.most_keys, scale, window
    )  # fmt: skip


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, head: int) -> tuple[Kernel | None, str]:
    """Return the kernel for queries of this device, dtype and head size, and why. None: there is none."""
    if device.type != "cuda":
        return None, f"the device is {device.type}"
    if dtype not in HALVES:
        return None, f"flash kernels compute bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head % 8 or head > LARGEST_HEAD:
        return None, f"a head of {head} numbers is not a multiple of 8 up to {LARGEST_HEAD}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return None, f"flash kernels need compute capability 8.0, and this GPU has {major}.{minor}"
    missing = []
    for make in (of_torch, of_flash_attn):
        found, why = make()
        if found is not None:
            return found, why
        missing.append(why)
    return None, "; ".join(missing)


def of_torch() -> tuple[Kernel | None, str]:
    """Return the kernel of torch, and its name or why there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, f"torch {torch.__version__} has no varlen_attn"
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= set(known):
        return None, f"varlen_attn of torch {torch.__version__} has no scale and window_size; 2.11 has them"
    grouped = {"enable_gqa": True} if "enable_gqa" in known else None
    name = f"varlen_attn of torch {torch.__version__}"
    return Kernel(name, _torch_call(varlen_attn, grouped)), name


def _torch_call(varlen_attn: Callable[..., Any], grouped: dict[str, bool] | None) -> Call:
    def call(
        q: Tensor, k: Tensor, v: Tensor, cu_queries: Tensor, cu_keys: Tensor, most_queries: int, most_keys: int,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        more, repeat = grouped or {}, q.shape[1] // k.shape[1]
        if repeat == 1:
            more = {}
        elif grouped is None:  # versions that do not state that keys may have fewer heads
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        span = (-1 if window is None else window - 1, 0)
        out: Tensor = varlen_attn(
            q.contiguous(), k.contiguous(), v.contiguous(), cu_queries, cu_keys, most_queries, most_keys, scale=scale,
            window_size=span, **more,
        )  # fmt: skip
        return out

    return call


def of_flash_attn() -> tuple[Kernel | None, str]:
    """Return the kernel of the package flash-attn, and its name or why there is none."""
    try:
        import flash_attn
    except ImportError:
        return None, "the package flash-attn is not installed"

    def call(
        q: Tensor, k: Tensor, v: Tensor, cu_queries: Tensor, cu_keys: Tensor, most_queries: int, most_keys: int,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        span = (-1 if window is None else window - 1, 0)
        out: Tensor = flash_attn.flash_attn_varlen_func(
            q, k, v, cu_queries, cu_keys, most_queries, most_keys, softmax_scale=scale, causal=True, window_size=span
        )
        return out

    name = f"flash-attn {flash_attn.__version__}"
    return Kernel(name, call), name
