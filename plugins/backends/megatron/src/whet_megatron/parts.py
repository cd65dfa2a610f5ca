"""Loads the parts of a checkpoint that a rank holds, in whatever parts it was saved."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def load_parts(
    state: dict[str, Any], folder: Path, prepare: Callable[[Sequence[Any]], None] = lambda tensors: None
) -> dict[str, Any]:
    """Return a state, as Megatron describes it, with the tensors and objects of a folder in the place of descriptions.

    What is no tensor or object stays as it is in `state`. Megatron would read it from `common.pt`, where the groups of
    the optimizer are those of the layout that saved: with experts over ranks there are other groups than without.
    `prepare` gets the descriptions of tensors before they are read.
    """
    from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from megatron.core.dist_checkpointing.utils import extract_sharded_base

    described, own, factories = load_preprocess(state)
    described, rest = extract_sharded_base(described)
    prepare([one for one in nested_values(described) if isinstance(one, ShardedTensor)])
    merge(rest, own)
    merge(rest, TorchDistLoadShardedStrategy().load(described, folder))
    found: dict[str, Any] = apply_factory_merges(rest, factories)
    return found
