"""Megatron's checkpoints of its optimizers where these use torch's AdamW, as they do without Transformer Engine.

That AdamW keeps the number of steps as a tensor of each parameter; Megatron expects it once for all. Its distributed
optimizer then fails when it loads, or gives all parameters one tensor, which each of them counts up: the first step
after a resume is right, and the second one is not.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def torch_adamw() -> Iterator[None]:
    """Describe and load the state of torch's AdamW correctly."""
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not USING_PYTORCH_OPTIMIZER:
        yield
        return
    load, describe = DistributedOptimizer.load_state_dict, DistributedOptimizer.sharded_state_dict

    @torch.no_grad()
    def set_state(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        state = {key: value for key, value in self.optimizer.state[main].items() if key != "step"}
        for key, value in {"param": main, **state}.items():
            value.copy_(tensors[key])

    def load_state(self: Any, state: Any) -> None:
        load(self, state)
        _own_steps(self.optimizer)

    def sharded(self: Any, model: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return describe(self, model, is_loading, *args, **kwargs)

    with ExitStack() as stack:
        for name, value in {
            "_set_main_param_and_optimizer_states": set_state,
            "load_state_dict": load_state,
            "sharded_state_dict": sharded,
        }.items():
            stack.enter_context(patch.object(DistributedOptimizer, name, value))
        yield


def _own_steps(optimizer: Any) -> None:
    """Give each parameter a step counter of its own."""
    for state in optimizer.state.values() if optimizer is not None else ():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
