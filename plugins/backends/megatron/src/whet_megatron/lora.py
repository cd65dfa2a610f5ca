"""LoRA (Hu et al. 2021, arXiv:2106.09685) on Megatron's layers: the weights are frozen, adapters are trained.

A and B are float32 parameters of the stage, each as large as this rank's part of its weight needs it. So Megatron adds
up their gradients, shares their moments out, and counts their norm as it does for weights. Their names and shapes in
files and on the way to a generator are those of PEFT.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from whet_megatron import cuts
from whet_megatron.architecture import Architecture
from whet_megatron.cuts import Place
from whet_megatron.lora_split import ExpertSplit, Split
from whet_megatron.lora_targets import adapted_weights, is_adaptable, sizes_of
from whet_megatron.rules import VALUE_HEAD as HEAD_RULE
from whet_megatron.weights import ModelWeights, Ruled
from whet_training.lora import HEAD_WEIGHT, VALUE_HEAD, AdapterSets, Pair, drawn_a, read_start, refuse_others
from whet_training.lora_config import LoraConfig
from whet_weights import adapter as peft


class Adapters(AdapterSets):
    """The adapters of the stages of this rank, and with a value head, the head: everything that is trained."""

    def __init__(
        self, weights: ModelWeights, architecture: Architecture, config: LoraConfig, seed: int, model_class: str
    ) -> None:
        """Freeze the stages, and add an adapter to each target. Call it before Megatron wraps them for training.

        Raises `ConfigError` if a target matches nothing, or if there are no experts to adapt.
        """
        super().__init__(config, seed)
        self._weights, self._arch = weights, architecture
        self.weights = adapted_weights(config, weights.rules, architecture, model_class)
        """The adapted weights of all stages, by name."""
        self._splits: dict[str, Split] = {}
        self._layers: dict[str, Callable[[], Pair | None]] = {}
        """What returns the adapter of a parameter of Megatron, by the first stored name of the parameter."""
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
        if self._config.experts:
            for layer in stage.decoder.layers:
                self._adapt_experts(layer.mlp.experts, layer.layer_number - 1)
        mine = list(self.pairs.values())[before:]
        stage.adapters = nn.ParameterList([matrix for pair in mine for matrix in pair])
        if stage.pre_process:
            with_gradient(stage.embedding)

    def _adapt_layer(self, module: Any, one: Ruled) -> None:
        from whet_megatron.lora_layers import AdaptedForward, ColumnForward, RowForward

        place, sizes = self._weights.place(one), sizes_of(one.rule, self._arch)[1]
        adapted = {name for name in one.stored if name in self.weights}
        sequence = self._weights.stages[0].config.sequence_parallel
        for name in one.stored:
            if name in adapted:
                self._add(name, Split(self.weights[name], place, sequence))
        if not adapted:
            return
        layer: AdaptedForward
        if one.rule.cut == "columns":
            layer = RowForward(self, module, one.stored[0])
        else:
            parts = [(name, rows // place.ranks) for name, rows in zip(one.stored, sizes, strict=True)]
            order = self._order(one, [rows for _, rows in parts], place).to(one.parameter.device)
            layer = ColumnForward(self, module, parts, adapted, order)
        module.forward = layer
        self._layers[one.stored[0]] = layer.pair

    def _adapt_experts(self, experts: Any, layer: int) -> None:
        """Add adapters to the experts of a layer."""
        from whet_megatron.lora_experts import Stack, adapt

        stacks, held = {}, self._weights.expert_place
        for rule in self._weights.rules:
            if rule.stacked:
                weight = rule.stacked.format(layer=layer)
                split = ExpertSplit(self.weights[weight], self._weights.expert_tensor_place, held=held)
                self._add(weight, split)
                stack = stacks[rule.name.split(".")[-2]] = Stack(self, weight, split)
                own = held.part(self._arch.experts)
                for expert in range(own.start, own.stop):
                    first = rule.stored[0].format(layer=layer, expert=expert)
                    self._layers[first] = partial(stack.pair, expert - own.start)
        adapt(experts, stacks)

    def _order(self, one: Ruled, rows: Sequence[int], place: Place) -> Tensor:
        """Return for each row of a rank's part of a layer its place among the rows of its stored weights."""
        share = evolve(
            self._arch, heads=self._arch.heads // place.ranks, kv_heads=self._arch.kv_heads // place.ranks
        )  # fmt: skip
        numbers = torch.split(torch.arange(sum(rows)), list(rows))
        return cuts.take(one.rule.cut, numbers, (sum(rows),), Place(0, 1), share)

    def _add(self, weight: str, split: Split) -> None:
        """Make this rank's part of the adapter of a weight."""
        self._splits[weight] = split
        a, b = self._shapes(weight)
        made = []
        for end, half in zip((peft.A, peft.B), split.part(drawn_a(self._seed, weight, a), torch.zeros(b)), strict=True):
            parameter = nn.Parameter(half.clone(memory_format=torch.contiguous_format).to(self._weights.device))
            split.mark(parameter, end)
            made.append(parameter)
        self.pairs[weight] = made[0], made[1]

    def _shapes(self, weight: str) -> tuple[Sequence[int], Sequence[int]]:
        return self._splits[weight].shapes(self.info.rank)

    def _part(self, weight: str, a: Tensor, b: Tensor) -> Pair:
        return self._splits[weight].part(a, b)

    # What is trained

    @property
    def names(self) -> frozenset[str]:
        """Return the names of what is trained on all stages: PEFT's without `base_model.model.`."""
        head = [f"{VALUE_HEAD}.weight"] if self._weights.value else []
        return frozenset([*(one.module + end for one in self.weights.values() for end in (peft.A, peft.B)), *head])

    def _named(self) -> Iterator[tuple[str, Split, str, Any]]:
        """Yield PEFT's name of each A and B of this rank, its split, its end and its parameter."""
        for weight, pair in self.pairs.items():
            for end, parameter in zip((peft.A, peft.B), pair, strict=True):
                yield self.weights[weight].module + end, self._splits[weight], end, parameter

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained on this rank, by PEFT's names without `base_model.model.`."""
        found: dict[str, Any] = {name: parameter for name, _, _, parameter in self._named()}
        return found | ({f"{VALUE_HEAD}.weight": self.head} if self.head is not None else {})

    def sharded(self) -> dict[str, Any]:
        """Return Megatron's description of what is trained, by which it saves moments for any parallelism."""
        from megatron.core import utils

        found = {name: split.sharded(name, parameter, end) for name, split, end, parameter in self._named()}
        if self.head is not None:
            name = f"{VALUE_HEAD}.weight"
            found[name] = utils.make_sharded_tensor_for_checkpoint(self.head, name)
        return found

    def computing(self, one: Ruled) -> Tensor:
        """Return this rank's part of a parameter with its part of the chosen adapters added."""
        weight = one.parameter.detach()
        if one.parameter is self.head:
            return weight.to(self._weights.stages[0].config.params_dtype)
        adapter = self._layers.get(one.stored[0])
        pair = None if adapter is None else adapter()
        return weight if pair is None else peft.merged(weight, *pair, self.scaling)

    # As PEFT has them

    @torch.no_grad()
    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the chosen adapters, and a value head, by PEFT's names, on every rank. All ranks must take part."""
        from megatron.core import parallel_state

        stages, device = parallel_state.get_pipeline_model_parallel_group(), self._weights.device
        modules = {one.module: weight for weight, one in self.weights.items()}
        for name, shape in self._stored_shapes().items():
            if (mine := self._whole(name, modules.get(name[: -len(peft.A)]))) is None:
                mine = torch.zeros(shape, device=device)
            torch.distributed.all_reduce(mine, group=stages)  # on all stages but one it is 0
            yield peft.PREFIX + name, mine

    def _whole(self, name: str, weight: str | None) -> Tensor | None:
        """Return a new tensor with the values of a chosen matrix, or without `weight` of the value head.

        None: they are not on this stage. The ranks that split the weight must take part.
        """
        if weight is None:
            return None if self.head is None else self.head.detach().clone()
        if self._chosen is None or (pair := self._chosen.get(weight)) is None:
            return None
        end, split = name[-len(peft.A) :], self._splits[weight]
        found = split.stored(name, split.whole(pair[end == peft.B].detach(), end))
        return found.clone(memory_format=torch.contiguous_format)  # else gloo would add up what lies elsewhere

    def _stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that what is trained on all stages has in PEFT's files."""
        found: dict[str, tuple[int, ...]] = {}
        for one in self.weights.values() if self._chosen is not None else ():
            rank = self.info.rank * max(1, one.experts)
            found |= {one.module + peft.A: (rank, one.columns), one.module + peft.B: (one.rows, rank)}
        return found | ({f"{VALUE_HEAD}.weight": (1, self._arch.hidden)} if self._weights.value else {})

    def refuse_others(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Raise `WhetError` unless tensors are what `stored` yields of this model."""
        refuse_others({peft.PREFIX + name: shape for name, shape in self._stored_shapes().items()}, tensors, source)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's parts of all adapters, and a value head, from tensors as `stored` yields them."""
        for weight, pair in self.pairs.items():
            names = [self.weights[weight].module + end for end in (peft.A, peft.B)]
            a, b = (self._splits[weight].read(name, tensors[peft.PREFIX + name]) for name in names)
            for target, part in zip(pair, self._part(weight, a, b), strict=True):
                target.data.copy_(part)
        if self.head is not None:
            self.head.data.copy_(tensors[HEAD_WEIGHT])

    def peft_config(self, base: str) -> dict[str, Any]:
        """Return the content of `adapter_config.json`."""
        linears = [one.module for one in self.weights.values() if not one.experts]
        stacked = [weight for weight, one in self.weights.items() if one.experts]
        return peft.peft_config(self.info, base, linears, stacked, [VALUE_HEAD] * self._weights.value)

    def _load_start(self, folder: Path) -> None:
        tensors = read_start(folder, self.info)
        if self._weights.value and (name := HEAD_WEIGHT) not in tensors:
            # On other stages than the last one only the shape counts.
            tensors[name] = torch.zeros(1, self._arch.hidden) if self.head is None else self.head.detach()
        self.refuse_others(tensors, f"backend.lora.adapter: {folder}")
        self.put(tensors)
