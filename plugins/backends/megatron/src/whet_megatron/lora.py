"""LoRA (Hu et al. 2021, arXiv:2106.09685) on Megatron's linear layers: the weights are frozen, adapters are trained.

A and B are float32 parameters of the stage, each as large as this rank's part of its weight needs it. So Megatron adds
up their gradients, shares their moments out, and counts their norm as it does for weights. Their names and shapes in
files and on the way to a generator are those of PEFT.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from whet_megatron import cuts
from whet_megatron.architecture import Architecture
from whet_megatron.cuts import Place
from whet_megatron.lora_layers import ColumnForward, RowForward, with_gradient
from whet_megatron.lora_targets import is_adaptable, linears, of_rule
from whet_megatron.rules import VALUE_HEAD as HEAD_RULE
from whet_megatron.weights import ModelWeights, Ruled, gathered
from whet_training.lora import VALUE_HEAD, AdapterSets, Pair, drawn_a, read_start, refuse_others
from whet_training.lora_config import LoraConfig, chosen
from whet_weights import adapter as peft


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
        ruled = {id(one.parameter): one for one in self._weights.ruled.values()}
        before = len(self.pairs)
        for module in stage.modules():
            one = ruled.get(id(module._parameters.get("weight")))
            if one is not None and is_adaptable(one.rule):
                self._adapt_layer(module, one)
            elif one is not None and one.rule == HEAD_RULE:
                one.parameter.data = one.parameter.data.float()
                self.head = one.parameter.requires_grad_()
        mine = list(self.pairs.values())[before:]
        stage.adapters = nn.ParameterList([matrix for pair in mine for matrix in pair])
        if stage.pre_process:
            with_gradient(stage.embedding)

    def _adapt_layer(self, module: Any, one: Ruled) -> None:
        place, shapes = self._weights.place(one), self._stored_shapes(one)
        adapted = {name for name in one.stored if name.removesuffix(".weight") in self.targets}
        for name, (rows, columns) in zip(one.stored, shapes, strict=True):
            if name in adapted:
                self._add(name, Split("in" if one.rule.cut == "columns" else "out", rows, columns), one.parameter)
        if not adapted:
            return
        if one.rule.cut == "columns":
            module.forward = RowForward(self, module, one.stored[0])
            return
        parts = [(name, rows // place.ranks) for name, (rows, _) in zip(one.stored, shapes, strict=True)]
        order = self._order(one, [rows for _, rows in parts], place).to(one.parameter.device)
        module.forward = ColumnForward(self, module, parts, adapted, order)

    def _order(self, one: Ruled, rows: Sequence[int], place: Place) -> Tensor:
        """Return for each row of a rank's part of a layer its place among the rows of its stored weights."""
        share = evolve(
            self._arch, heads=self._arch.heads // place.ranks, kv_heads=self._arch.kv_heads // place.ranks
        )  # fmt: skip
        numbers = torch.arange(sum(rows)).split(list(rows))
        return cuts.take(one.rule.cut, numbers, (sum(rows),), Place(0, 1), share)

    def _add(self, weight: str, split: Split, beside: Tensor) -> None:
        self._splits[weight] = split
        a, b = self._shapes(weight)
        whole = drawn_a(self._seed, weight, a), torch.zeros(b)
        device, sequence = beside.device, self._weights.stages[0].config.sequence_parallel
        made = []
        for end, half in zip((peft.A, peft.B), self._part(weight, *whole), strict=True):
            parameter: Any = nn.Parameter(half.clone().to(device))
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

    # As PEFT has them

    @torch.no_grad()
    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the chosen adapters, and a value head, by PEFT's names, on rank 0. Every rank must iterate to the end."""
        yield from self._weights.on_rank_0(self._stored_of_stage())

    def _stored_of_stage(self) -> Iterator[tuple[str, Tensor]]:
        for weight in self.pairs if self._chosen is not None else ():
            module = peft.PREFIX + weight.removesuffix(".weight")
            yield from zip((module + peft.A, module + peft.B), self._whole(weight), strict=True)
        if self.head is not None:
            yield f"{peft.PREFIX}{VALUE_HEAD}.weight", self.head.detach()

    def _whole(self, weight: str) -> list[Tensor]:
        """Return the chosen A and B of a weight from all tensor parallel ranks, which must take part."""
        from megatron.core import parallel_state

        assert self._chosen is not None
        group, found = parallel_state.get_tensor_model_parallel_group(), []
        for end, half in zip((peft.A, peft.B), self._chosen[weight], strict=True):
            axis = self._splits[weight].axis(end)
            found.append(half.detach() if axis is None else torch.cat(gathered(half.detach(), group), axis))
        return found

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return a whole weight with its chosen adapter added. All ranks that hold the layer must take part."""
        if self.head is not None and name == f"{VALUE_HEAD}.weight":
            return weight.to(self._weights.stages[0].config.params_dtype)
        if self._chosen is None or name not in self.pairs:
            return weight
        a, b = self._whole(name)
        return peft.merged(weight, a, b, self.scaling)

    def put(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Set this rank's parts of all adapters, and a value head, from tensors as `stored` yields them.

        Raises `WhetError` if they are not those of this model.
        """
        rank, head = self.info.rank, f"{peft.PREFIX}{VALUE_HEAD}.weight"
        wanted = {}
        for name, (rows, columns) in self._sizes().items():
            wanted |= {peft.PREFIX + name + peft.A: [rank, columns], peft.PREFIX + name + peft.B: [rows, rank]}
        if self._weights.value:
            wanted[head] = [1, self._arch.hidden]
        refuse_others(wanted, tensors, source)
        for weight, pair in self.pairs.items():
            module = peft.PREFIX + weight.removesuffix(".weight")
            for target, part in zip(
                pair, self._part(weight, tensors[module + peft.A], tensors[module + peft.B]), strict=True
            ):
                target.data.copy_(part)
        if self.head is not None:
            self.head.data.copy_(tensors[head])

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the adapted weights of all stages: layers of other stages are as those of this one."""
        found: dict[str, tuple[int, ...]] = {}
        for one in self._weights.ruled.values():
            if is_adaptable(one.rule):
                shapes = self._stored_shapes(one)
                for names in of_rule(one.rule, self._arch):
                    found |= dict(zip(names, shapes, strict=True))
        return {name: found[name] for name in self.targets}

    def _stored_shapes(self, one: Ruled) -> list[tuple[int, ...]]:
        return cuts.stored_shapes(one.rule.cut, tuple(one.parameter.shape), self._weights.place(one), self._arch)

    def peft_config(self, base: str) -> dict[str, Any]:
        """Return the content of `adapter_config.json`."""
        return peft.peft_config(self.info, base, self.targets, (), [VALUE_HEAD] * self._weights.value)

    def _load_start(self, folder: Path) -> None:
        tensors = read_start(folder, self.info)
        if self._weights.value and (name := f"{peft.PREFIX}{VALUE_HEAD}.weight") not in tensors:
            held = self.head is not None  # on other stages than the last one only the shape counts
            tensors[name] = self.head.detach() if held else torch.zeros(1, self._arch.hidden)
        self.put(tensors, f"backend.lora.adapter: {folder}")
