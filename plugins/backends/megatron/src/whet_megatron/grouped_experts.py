"""Experts whose matrices are multiplied at once: Megatron's module, and plain layers for it that run on CPUs.

    one after the other    mlp.experts.local_experts.7.linear_fc1.weight
    grouped                mlp.experts.linear_fc1.weight7

Rules and checkpoints have the first names, so both are the same for them.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12])\.weight(\d+)")


def single_name(name: str) -> str:
    """Return the name that a parameter of grouped experts has where they are computed one after the other."""
    found = _GROUPED.fullmatch(name)
    return f"{found[1]}.local_experts.{found[3]}.{found[2]}.weight" if found else name


def plain_experts() -> Any:
    """Return the specification of Megatron's grouped experts, of plain layers."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=PlainColumns, linear_fc2=PlainRows))


class PlainGroupedLinear(torch.nn.Module):
    """The matrices of the experts that a rank holds, named as Transformer Engine names them. A test vehicle."""

    axis: int
    """The axis of a matrix [outputs, inputs] that tensor parallel ranks of an expert split."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, **options: Any
    ) -> None:
        super().__init__()
        self._experts, self._groups = num_gemms, pg_collection
        shape = [output_size, input_size]
        shape[self.axis] //= pg_collection.expt_tp.size()
        for number in range(num_gemms):
            weight: Any = torch.nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
            # Megatron adds the gradients of experts up over a group of their own.
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, tokens: list[int]) -> tuple[Tensor, None]:
        """Return the products, and no bias. x [T, inputs]: the tokens of each expert in turn, `tokens` of each."""
        parts = torch.split(x, tokens)
        found = [F.linear(part, self.get_parameter(f"weight{number}")) for number, part in enumerate(parts)]
        return torch.cat(found), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return what a checkpoint holds of it: the same as of experts that are computed one after the other."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        ep, found = self._groups.ep, {}
        for number in range(self._experts):
            place = (len(sharded_offsets), ep.rank() * self._experts + number, ep.size() * self._experts)
            state = {"weight": self.get_parameter(f"weight{number}"), "_extra_state": None}
            parts = make_sharded_tensors_for_checkpoint(
                state, prefix, {"weight": self.axis}, (*sharded_offsets, place), tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )  # fmt: skip
            for part in parts.values():
                part.replica_id = (*part.replica_id[:2], self._groups.expt_dp.rank())
            found[f"{prefix}weight{number}"] = parts[f"{prefix}weight"]
            found[f"{prefix}_extra_state{number or ''}"] = parts[f"{prefix}_extra_state"]
        return found

    def get_extra_state(self) -> None:
        """Return nothing. Checkpoints have a place for what Transformer Engine keeps of FP8."""

    def set_extra_state(self, state: Any) -> None:
        """Do nothing."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        """Load the matrices. Of the states of further experts torch knows nothing."""
        for number in range(1, self._experts):
            state.pop(f"{prefix}_extra_state{number}", None)
        super()._load_from_state_dict(state, prefix, *args)


class PlainColumns(PlainGroupedLinear):
    """Ranks split the outputs."""

    axis = 0


class PlainRows(PlainGroupedLinear):
    """Ranks split the inputs."""

    axis = 1
