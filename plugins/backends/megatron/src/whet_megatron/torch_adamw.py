"""Megatron's checkpoints of its optimizers where these use torch's AdamW, as they do without Transformer Engine.

That AdamW keeps the number of steps as a tensor of each parameter; Megatron expects it once for all. Its distributed
optimizer then fails when it loads, or gives all parameters one tensor, which each of them counts up: the first step
after a resume is right, and the second one is not. Before the first step there is no state, and Megatron makes one by a
step, which decays the weights.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def torch_adamw() -> Iterator[None]:
    """Make Megatron load the moments of torch's AdamW."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    @torch.no_grad()
    def set_state(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        state = {key: value for key, value in self.optimizer.state[main].items() if key != "step"}
        for key, value in {"param": main, **state}.items():
            value.copy_(tensors[key])

    if _uses_torch():
        with patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_state):
            yield
    else:
        yield


def begin(optimizers: Iterable[Any]) -> None:
    """Make the state from which AdamW begins, of parameters that no step has updated: Megatron cannot save none.

    The AdamW of Transformer Engine counts its steps elsewhere.
    """
    torchs = _uses_torch()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[parameter] = {**({"step": torch.zeros(())} if torchs else {}), **moments}


def count(state: Any, steps: int) -> None:
    """Set the number of steps in a state as Megatron describes it: of groups, and of torch's AdamW of parameters."""
    for key, value in state.items() if isinstance(state, dict) else ():
        count(value, steps)
        for group in value if key == "param_groups" else ():
            group["step"] = steps
        if key == "state" and isinstance(value, dict) and _uses_torch():
            value["common_step"] = torch.tensor(float(steps))


def own_steps(optimizers: Iterable[Any], steps: int) -> None:
    """Make a step counter of its own for each parameter."""
    for optimizer in optimizers if _uses_torch() else ():
        for state in optimizer.state.values():
            state["step"] = torch.tensor(float(steps))


def _uses_torch() -> bool:
    """Return whether Megatron's optimizers use torch's AdamW, and not that of Transformer Engine or Apex."""
    import megatron.core.optimizer as module

    return bool(getattr(module, "USING_PYTORCH_OPTIMIZER", False))
