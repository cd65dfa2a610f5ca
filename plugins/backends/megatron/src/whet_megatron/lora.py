"""LoRA (Hu et al. 2021, arXiv:2106.09685) on Megatron's linear layers: the weights are frozen, adapters are trained.

A and B are float32 parameters of the stage, each as large as this rank's part of its weight needs it. So Megatron adds
up their gradients, shares their moments out, and counts their norm as it does for weights. Their names and shapes in
files and on the way to a generator are those of PEFT.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from whet_megatron import cuts
from whet_megatron.architecture import Architecture
from whet_megatron.cuts import Place
from whet_megatron.lora_targets import is_adaptable, linears, of_rule
from whet_megatron.rules import VALUE_HEAD as HEAD_RULE
from whet_megatron.weights import ModelWeights, Ruled
from whet_training.lora import VALUE_HEAD, AdapterSets, Pair, drawn_a, read_start, refuse_others
from whet_training.lora_config import LoraConfig, chosen
from whet_weights import adapter as peft

if TYPE_CHECKING:
    from whet_megatron.lora_layers import AdaptedForward


@frozen
class Split:
    """How tensor parallel ranks share an adapter: by the side of the weight that they share."""

    side: Literal["out", "in"]
    rows: int
    """Outputs of the whole weight."""
    columns: int
    """Inputs of the whole weight."""

    def axis(self, end: str) -> int | None:
        """Return the dimension along which ranks share A or B. None: every rank has all of it."""
        if end == peft.A:
            return 1 if self.side == "in" else None
        return 0 if self.side == "out" else None


class Adapters(AdapterSets):
    """The adapters of the stages of this rank, and with a value head, the head: everything that is trained."""

    def __init__(
        self, weights: ModelWeights, architecture: Architecture, config: LoraConfig, seed: int, model_class: str
    ) -> None:
        """Freeze the stages, and add an adapter to each target. Call it before Megatron wraps them for training.

        Raises `ConfigError` if a target matches nothing.
        """
        super().__init__(config, seed)
        self._weights, self._arch = weights, architecture
        self._splits: dict[str, Split] = {}
        self._layers: dict[str, AdaptedForward] = {}
        """By the first stored name of their weights."""
        names = linears(weights.rules, architecture)
        self.targets = chosen(config.targets, names, model_class) if config.targets else names
        """The adapted linear layers of all stages, by PEFT's names."""
        self.head: nn.Parameter | None = None
        for stage in weights.stages:
            stage.requires_grad_(False)
            self._adapt(stage)
        if config.adapter:
            self._load_start(Path(config.adapter))
        self._remember_start()

    def _adapt(self, stage: Any) -> None:
        """Add adapters to the layers of a stage, and make them its parameters."""
        from whet_megatron.lora_layers import with_gradient

        ruled = {id(one.parameter): one for one in self._weights.ruled.values()}
        before = len(self.pairs)
        for module in stage.modules():
            one = ruled.get(id(module._parameters.get("weight")))
            if one is not None and is_adaptable(one.rule):
                self._adapt_layer(module, one)
            elif one is not None and one.rule == HEAD_RULE:
                one.parameter.data = one.parameter.data.float()
                one.parameter.requires_grad_()
                self.head = one.parameter
        mine = list(self.pairs.values())[before:]
        stage.adapters = nn.ParameterList([matrix for pair in mine for matrix in pair])
        if stage.pre_process:
            with_gradient(stage.embedding)

    def _adapt_layer(self, module: Any, one: Ruled) -> None:
        from whet_megatron.lora_layers import ColumnForward, RowForward

        place, shapes = self._weights.place(one), self._stored_shapes(one)
        adapted = {name for name in one.stored if name.removesuffix(".weight") in self.targets}
        for name, (rows, columns) in zip(one.stored, shapes, strict=True):
            if name in adapted:
                self._add(name, Split("in" if one.rule.cut == "columns" else "out", rows, columns), one.parameter)
        if not adapted:
            return
        layer: AdaptedForward
        if one.rule.cut == "columns":
            layer = RowForward(self, module, one.stored[0])
        else:
            parts = [(name, rows // place.ranks) for name, (rows, _) in zip(one.stored, shapes, strict=True)]
            order = self._order(one, [rows for _, rows in parts], place).to(one.parameter.device)
            layer = ColumnForward(self, module, parts, adapted, order)
        self._layers[one.stored[0]] = module.forward = layer

    def _order(self, one: Ruled, rows: Sequence[int], place: Place) -> Tensor:
        """Return for each row of a rank's part of a layer its place among the rows of its stored weights."""
        share = evolve(
            self._arch, heads=self._arch.heads // place.ranks, kv_heads=self._arch.kv_heads // place.ranks
        )  # fmt: skip
        numbers = torch.split(torch.arange(sum(rows)), list(rows))
        return cuts.take(one.rule.cut, numbers, (sum(rows),), Place(0, 1), share)

    def _add(self, weight: str, split: Split, beside: Tensor) -> None:
        self._splits[weight] = split
        a, b = self._shapes(weight)
        whole = drawn_a(self._seed, weight, a), torch.zeros(b)
        sequence = self._weights.stages[0].config.sequence_parallel
        made = []
        for end, half in zip((peft.A, peft.B), self._part(weight, *whole), strict=True):
            parameter: Any = nn.Parameter(half.clone().to(beside.device))
            axis = split.axis(end)
            if axis is None:
                parameter.sequence_parallel = sequence  # whether Megatron adds its gradient up over tensor ranks
            else:  # else its norm counts that of one rank only
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = axis, 1
            made.append(parameter)
        self.pairs[weight] = made[0], made[1]

    def _shapes(self, weight: str) -> tuple[Sequence[int], Sequence[int]]:
        split = self._splits[weight]
        return (self.info.rank, split.columns), (split.rows, self.info.rank)

    def _part(self, weight: str, a: Tensor, b: Tensor) -> Pair:
        place = self._weights.tensor_place
        if self._splits[weight].side == "out":
            return a, b[place.part(len(b))]
        return a[:, place.part(a.shape[1])], b

    # What is trained

    @property
    def names(self) -> frozenset[str]:
        """Return the names of what is trained on all stages: PEFT's without `base_model.model.`."""
        head = [f"{VALUE_HEAD}.weight"] if self._weights.value else []
        return frozenset([*(name + end for name in self.targets for end in (peft.A, peft.B)), *head])

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained on this rank, by PEFT's names without `base_model.model.`."""
        found: dict[str, Any] = {}
        for weight, (a, b) in self.pairs.items():
            module = weight.removesuffix(".weight")
            found |= {module + peft.A: a, module + peft.B: b}
        if self.head is not None:
            found[f"{VALUE_HEAD}.weight"] = self.head
        return found

    def sharded(self) -> dict[str, Any]:
        """Return Megatron's description of what is trained, by which it saves moments for any parallelism."""
        from megatron.core import utils

        found = {}
        for name, parameter in self.parameters().items():
            end = name[-len(peft.A) :]
            axis = self._splits[f"{name.removesuffix(end)}.weight"].axis(end) if end in (peft.A, peft.B) else None
            if axis is None:
                found[name] = utils.make_sharded_tensor_for_checkpoint(parameter, name)
            else:
                found[name] = utils.make_tp_sharded_tensor_for_checkpoint(parameter, name, tp_axis=axis)
        return found

    def computing(self, one: Ruled) -> Tensor:
        """Return this rank's part of a parameter with its part of the chosen adapters added."""
        weight = one.parameter.detach()
        if one.parameter is self.head:
            return weight.to(self._weights.stages[0].config.params_dtype)
        layer = self._layers.get(one.stored[0])
        pair = None if layer is None else layer.pair()
        return weight if pair is None else peft.merged(weight, *pair, self.scaling)

    # As PEFT has them

    @torch.no_grad()
    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the chosen adapters, and a value head, by PEFT's names, on every rank. All ranks must take part."""
        from megatron.core import parallel_state

        stages, device = parallel_state.get_pipeline_model_parallel_group(), self._weights.device
        for name, shape in self._shapes_of_all().items():
            if (mine := self._whole(name)) is None:
                mine = torch.zeros(shape, device=device)
            torch.distributed.all_reduce(mine, group=stages)  # on all stages but one it is 0
            yield peft.PREFIX + name, mine

    def _whole(self, name: str) -> Tensor | None:
        """Return a new tensor with the values of a chosen matrix or value head of this stage. None: it has none such.

        The tensor parallel ranks must take part.
        """
        from megatron.core import parallel_state

        module, end = name[: -len(peft.A)], name[-len(peft.A) :]
        if end not in (peft.A, peft.B):
            return None if self.head is None else self.head.detach().clone()
        if self._chosen is None or (pair := self._chosen.get(f"{module}.weight")) is None:
            return None
        half, axis = pair[end == peft.B].detach(), self._splits[f"{module}.weight"].axis(end)
        if axis is None:
            return half.clone(memory_format=torch.contiguous_format)  # else gloo would add up what lies elsewhere
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(half, memory_format=torch.contiguous_format) for _ in range(group.size())]
        torch.distributed.all_gather(parts, half.contiguous(), group=group)
        return torch.cat(parts, axis)

    def _shapes_of_all(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what is trained on all stages. Layers of other stages are as those of this one."""
        rank, sizes = self.info.rank, dict[str, tuple[int, ...]]()
        for one in self._weights.ruled.values():
            if is_adaptable(one.rule):
                for names in of_rule(one.rule, self._arch):
                    sizes |= dict(zip(names, self._stored_shapes(one), strict=True))
        found: dict[str, tuple[int, ...]] = {}
        for name in self.targets if self._chosen is not None else ():
            rows, columns = sizes[name]
            found |= {name + peft.A: (rank, columns), name + peft.B: (rows, rank)}
        return found | ({f"{VALUE_HEAD}.weight": (1, self._arch.hidden)} if self._weights.value else {})

    def _stored_shapes(self, one: Ruled) -> list[tuple[int, ...]]:
        return cuts.stored_shapes(one.rule.cut, tuple(one.parameter.shape), self._weights.place(one), self._arch)

    def refuse_others(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Raise `WhetError` unless tensors are what `stored` yields of this model."""
        refuse_others({peft.PREFIX + name: shape for name, shape in self._shapes_of_all().items()}, tensors, source)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's parts of all adapters, and a value head, from tensors as `stored` yields them."""
        for weight, pair in self.pairs.items():
            module = peft.PREFIX + weight.removesuffix(".weight")
            parts = self._part(weight, tensors[module + peft.A], tensors[module + peft.B])
            for target, part in zip(pair, parts, strict=True):
                target.data.copy_(part)
        if self.head is not None:
            self.head.data.copy_(tensors[f"{peft.PREFIX}{VALUE_HEAD}.weight"])

    def peft_config(self, base: str) -> dict[str, Any]:
        """Return the content of `adapter_config.json`."""
        return peft.peft_config(self.info, base, self.targets, (), [VALUE_HEAD] * self._weights.value)

    def _load_start(self, folder: Path) -> None:
        tensors = read_start(folder, self.info)
        if self._weights.value and (name := f"{peft.PREFIX}{VALUE_HEAD}.weight") not in tensors:
            # On other stages than the last one only the shape counts.
            tensors[name] = torch.zeros(1, self._arch.hidden) if self.head is None else self.head.detach()
        self.refuse_others(tensors, f"backend.lora.adapter: {folder}")
        self.put(tensors)
