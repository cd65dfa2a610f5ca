"""The memory of weights, gradients and optimizer on one rank, from numbers alone. Imports no torch."""

from collections.abc import Iterator

from whet.component import MemoryTerm
from whet.data.model_info import DTYPE_BYTES
from whet_megatron.architecture import Architecture
from whet_megatron.parallel import ParallelConfig, padded_rows


def held(sizes: ParallelConfig, model: Architecture, multiple: int) -> tuple[int, int]:
    """Return the parameters of a rank of the fullest stage: those outside of experts, and those of experts.

    The first stage has the embedding and the last one the head; a single stage has both.
    """
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads) // sizes.tensor
    norms = 2 * model.hidden + (2 * model.head_dim if model.qk_norm else 0)
    outer = padded_rows(model.vocabulary, sizes.tensor, multiple) * model.hidden
    outer *= 2 if sizes.pipeline == 1 and not model.tied else 1
    layers = model.layers // sizes.pipeline
    if not model.experts:
        return outer + layers * (attention + norms + 3 * model.hidden * model.mlp // sizes.tensor), 0
    one = 3 * model.hidden * model.expert_mlp // sizes.expert_tensor
    router = model.experts * model.hidden
    return outer + layers * (attention + norms + router), layers * one * model.experts // sizes.expert


def adapter(sizes: ParallelConfig, parameters: int) -> Iterator[MemoryTerm]:
    """Yield the memory of an adapter of so many parameters on a rank, where tensor parallel ranks had all of it."""
    held, lower = parameters // sizes.pipeline, "lower backend.lora.rank"
    yield MemoryTerm("the adapter and its moments in float32", 12 * held, change=lower)
    yield MemoryTerm("gradients of the adapter in float32", 4 * held, kept_asleep=False, change=lower)


def terms(
    sizes: ParallelConfig, model: Architecture, dtype: str, ranks: int, copies: int, multiple: int,
    *, sharded: bool, trained: bool,
) -> Iterator[MemoryTerm]:  # fmt: skip
    """Yield the memory of a rank. `copies` of the weights compute; the optimizer is `sharded` over data-parallel ranks.

    Activations are not counted.
    """
    dense, sparse = held(sizes, model, multiple)
    number = DTYPE_BYTES[dtype]
    change = "raise parallel.tensor, parallel.pipeline or, for experts, parallel.expert"
    yield MemoryTerm(f"weights in {dtype}, which compute", number * (dense + sparse), change=change)
    if copies > 1:
        yield MemoryTerm("weights of the reference", number * (dense + sparse), change="drop backend.reference")
    if not trained:
        return
    yield MemoryTerm("gradients in float32", 4 * (dense + sparse), kept_asleep=False, change=change)
    data = ranks // (sizes.tensor * sizes.pipeline) if sharded else 1
    expert_data = ranks // (sizes.expert * sizes.expert_tensor * sizes.pipeline) if sharded else 1
    state = dense // max(1, data) + sparse // max(1, expert_data)
    # In float32 the weights that compute are those that the optimizer updates.
    what, size = ("two moments", 8) if number == 4 else ("two moments and weights", 12)
    over = f", shared out over {data} data-parallel ranks" if data > 1 else ""
    yield MemoryTerm(f"AdamW's {what} in float32{over}", size * state, change=change)
