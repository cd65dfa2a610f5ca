"""The memory of weights, gradients and optimizer on one rank, from numbers alone. Imports no torch."""

from collections.abc import Iterator

from whet.component import MemoryTerm
from whet.data.model_info import DTYPE_BYTES
from whet_megatron.architecture import Architecture
from whet_megatron.parallel import ParallelConfig, padded_rows


def held(
    sizes: ParallelConfig, model: Architecture, multiple: int, stage: int | None = None, *, value: bool = False
) -> tuple[int, int]:
    """Return the parameters of a rank of one pipeline stage: those outside of experts, and those of experts.

    `stage` None: the fullest stage. The first one has the embedding. The last one has the head, which is a second copy
    of a tied embedding unless a single stage has both. `value`: the head gives one number.
    """
    if stage is None:
        ends = {held(sizes, model, multiple, end, value=value) for end in (0, sizes.pipeline - 1)}
        return max(ends, key=sum)
    matrix = padded_rows(model.vocabulary, sizes.tensor, multiple) * model.hidden
    first, last = stage == 0, stage == sizes.pipeline - 1
    shared = model.tied and first and not value
    head = model.hidden + (model.hidden if value else 0 if shared else matrix)
    outer = first * matrix + last * head  # the last stage has a norm, too
    query, key = model.heads * model.head_dim // sizes.tensor, model.kv_heads * model.head_dim // sizes.tensor
    attention = 2 * model.hidden * (query + key) + model.qkv_bias * (query + 2 * key)
    norms = 2 * model.hidden + (2 * model.head_dim if model.qk_norm else 0)
    layers = model.layers // sizes.pipeline
    if not model.experts:
        return outer + layers * (attention + norms + 3 * model.hidden * model.mlp // sizes.tensor), 0
    one = 3 * model.hidden * model.expert_mlp // sizes.expert_tensor
    router = model.experts * model.hidden
    return outer + layers * (attention + norms + router), layers * one * model.experts // sizes.expert


def state(sizes: ParallelConfig, ranks: int, dense: int, sparse: int, *, sharded: bool) -> int:
    """Return the parameters of which a rank holds the optimizer's state, which data-parallel ranks share out if it is
    `sharded`.
    """
    if not sharded:
        return dense + sparse
    data = max(1, ranks // (sizes.tensor * sizes.pipeline))  # context parallel ranks share it out, too
    expert_data = max(1, ranks // (sizes.expert * sizes.expert_tensor * sizes.pipeline))
    return dense // data + sparse // expert_data


def terms(
    sizes: ParallelConfig, model: Architecture, dtype: str, ranks: int, copies: int, multiple: int,
    *, sharded: bool, trained: bool, value: bool = False,
) -> Iterator[MemoryTerm]:  # fmt: skip
    """Yield the memory of a rank of the fullest stage. `copies` of the weights compute; the optimizer is `sharded` over
    data-parallel ranks.

    Activations are not counted: see `whet_megatron.forecast`.
    """
    dense, sparse = held(sizes, model, multiple, value=value)
    number = DTYPE_BYTES[dtype]
    change = "raise parallel.tensor, parallel.pipeline or, for experts, parallel.expert"
    yield MemoryTerm(
        f"weights in {dtype}, which compute", number * (dense + sparse), lent=True, woken="adapter", change=change
    )
    if copies > 1:
        yield MemoryTerm("weights of the reference", number * (dense + sparse), change="drop backend.reference")
    if not trained:
        return
    yield MemoryTerm("gradients in float32", 4 * (dense + sparse), kept_asleep=False, change=change)
    # In float32 the weights that compute are those that the optimizer updates.
    what, size = ("two moments", 8) if number == 4 else ("two moments and weights", 12)
    data = ranks // (sizes.tensor * sizes.pipeline) if sharded else 1
    over = f", shared out over {data} data-parallel ranks" if data > 1 else ""
    own = size * state(sizes, ranks, dense, sparse, sharded=sharded)
    yield MemoryTerm(f"AdamW's {what} in float32{over}", own, change=change)
