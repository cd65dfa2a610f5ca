"""The parameters of a rank by rules: read from a model folder, and streamed under their stored names."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from whet.data.model_info import ModelInfo
from whet.errors import WhetError
from whet_megatron import cuts
from whet_megatron.architecture import Architecture, family
from whet_megatron.cuts import Place
from whet_megatron.grouped_experts import single_name
from whet_megatron.groups import Ranks
from whet_megatron.rules import VALUE_HEAD, Rule
from whet_megatron.stored import StoredWeights, stored_weights


@frozen(eq=False)
class Ruled:
    """A parameter of this rank, and what it is made of."""

    parameter: nn.Parameter
    rule: Rule
    stored: tuple[str, ...]
    """Names in the model folder."""
    expert: bool = False
    """Whether it is of an expert."""


class ModelWeights:
    """The parameters of the stages of one rank."""

    def __init__(
        self, stages: Sequence[Any], architecture: Architecture, info: ModelInfo, ranks: Ranks, *, value: bool
    ) -> None:
        self.stages, self.architecture, self._ranks = tuple(stages), architecture, ranks
        self._info = info
        found = family(info)
        assert found is not None
        self.rules = [VALUE_HEAD if value and rule.name == VALUE_HEAD.name else rule for rule in found.rules]
        self.value = value
        self.computing: Callable[[Ruled], Tensor] = lambda one: one.parameter.detach()
        """What of a parameter computes: itself, or with an adapter their sum."""
        self.names: frozenset[str] = frozenset()
        """The first stored name of each parameter of all ranks, known once the weights are loaded."""
        self.ruled: dict[str, Ruled] = {}
        """By Megatron's names, with layers and experts counted over all ranks, in order."""
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                self._add(_whole_name(stage, name), parameter, self.rules)

    def _add(self, name: str, parameter: nn.Parameter, rules: Sequence[Rule]) -> None:
        head, mark, tail = name.partition(".local_experts.")
        if mark:
            number, _, rest = tail.partition(".")
            held = self.architecture.experts // self._ranks.sizes.expert
            name = f"{head}{mark}{int(number) + self.expert_place.rank * held}.{rest}"
        rule, stored = _rule(rules, name)
        if self.architecture.tied and rule.stored == ("lm_head.weight",):
            rule = evolve(rule, stored=("model.embed_tokens.weight",))
            stored = rule.stored
        self.ruled[name] = Ruled(parameter, rule, stored, bool(mark))
        _mark(parameter, rule)

    def _first_names(self, there: frozenset[str]) -> Iterator[str]:
        """Yield the first stored name of each parameter of all ranks."""
        for rule in self.rules:
            for layer, expert in self.architecture.numbers(rule):
                name = rule.stored[0].format(layer=layer, expert=expert)
                if name in there or rule == VALUE_HEAD:
                    yield name

    def _places(self) -> frozenset[str]:
        """Return the stored names of the parameters of all ranks."""
        rules = [rule for rule in self.rules if self.architecture.has(rule) or rule == VALUE_HEAD]
        return frozenset(
            name.format(layer=layer, expert=expert)
            for rule in rules for layer, expert in self.architecture.numbers(rule) for name in rule.stored
        )  # fmt: skip

    def place(self, one: Ruled) -> Place:
        """Return this rank's place among those that share a parameter."""
        return self.expert_tensor_place if one.expert else self.tensor_place

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""
        return self._ranks.device

    @property
    def tensor_place(self) -> Place:
        """Return this rank's place among those that share the matrices outside of experts."""
        return Place(self._ranks.coordinates.tensor, self._ranks.sizes.tensor)

    @property
    def expert_place(self) -> Place:
        """Return this rank's place among those that have different experts."""
        from megatron.core import parallel_state

        return _place(parallel_state.get_expert_model_parallel_group())

    @property
    def expert_tensor_place(self) -> Place:
        """Return this rank's place among those that share the matrices of an expert."""
        from megatron.core import parallel_state

        return _place(parallel_state.get_expert_tensor_parallel_group())

    @torch.no_grad()
    def load(self, folder: str, new_head: Tensor | None = None) -> None:
        """Read this rank's part of each weight. A value head that the folder lacks becomes `new_head`."""
        with stored_weights(folder) as weights:
            self.names = frozenset(self._first_names(weights.names))
            weights.check_left_out(self._places(), self._info, value=self.value, aloud=self._ranks.rank == 0)
            for one in self.ruled.values():
                if one.rule == VALUE_HEAD and one.stored[0] not in weights.names:
                    if new_head is None:
                        raise WhetError(
                            f"model.path: the model in {folder} has no value head ({one.stored[0]}), and nothing "
                            "trains a new one here; give the folder of a reward model"
                        )
                    one.parameter.copy_(new_head)
                else:
                    self._read(weights, one, folder)

    def _read(self, weights: StoredWeights, one: Ruled, folder: str) -> None:
        slices = [weights.slices(name) for name in one.stored]
        shape, place = tuple(one.parameter.shape), self.place(one)
        self._refuse_others(weights, one, folder)
        found = cuts.take(one.rule.cut, slices, shape, place, self.architecture)
        if tuple(found.shape) != shape:
            words = f"{' and '.join(one.stored)} hold {tuple(found.shape)} of this rank's part, wanted {shape}"
            raise WhetError(f"model.path: the weights in {folder} hold another shape than config.json says: {words}")
        one.parameter.copy_(found)

    def _refuse_others(self, weights: StoredWeights, one: Ruled, folder: str) -> None:
        """Raise `WhetError` if the stored weights have other sizes than the config says."""
        wanted = cuts.stored_shapes(one.rule.cut, tuple(one.parameter.shape), self.place(one), self.architecture)
        for name, shape in zip(one.stored, wanted, strict=True):
            if (found := weights.shape(name)) != shape:
                raise WhetError(
                    f"model.path: the weights in {folder} hold {name} as {list(found)}, and config.json says "
                    f"{list(shape)}; is config.json that of these weights?"
                )

    @torch.no_grad()
    def sent(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (stored name, whole tensor) of the weights that this rank sends. Every rank must iterate to the end.

        The ranks that share a parameter gather it where it is sent, one parameter at a time. Receivers may read one
        sender after another: so ranks take part for the senders of their stage in the order of these. `dtype`: weights
        are cast to it before they are gathered.
        """
        for expert in range(self._ranks.sizes.expert):
            source = self._ranks.grid.source(self._ranks.coordinates.pipeline, expert)
            for one in self._shared(source, expert):
                if parts := self._parts(one, source, dtype):
                    whole = cuts.join(one.rule.cut, parts, self.architecture)
                    del parts  # else the next parameter is gathered beside it
                    for name in one.stored:
                        yield name, whole.pop(0)

    def _shared(self, source: int, expert: int) -> Iterator[Ruled]:
        """Yield the parameters that a rank sends and of which this rank holds a part."""
        for one in self.ruled.values():
            sent = (one.expert or expert == 0) and self._is_own(one)
            if sent and self._ranks.rank in self._ranks.grid.sharers(source, expert=one.expert):
                yield one

    def _is_own(self, one: Ruled) -> bool:
        """Return whether a parameter is no copy of another stage's: the last stage has one of a tied embedding."""
        return not (self.architecture.tied and one.rule.name == "output_layer.weight" and one.rule.cut == "vocabulary")

    def _parts(self, one: Ruled, source: int, dtype: torch.dtype | None) -> list[Tensor]:
        """Return the parts of all ranks that share a parameter, in order, on the rank `source`. Elsewhere: nothing."""
        from megatron.core import parallel_state

        tensor = self.computing(one).to(dtype)
        if one.rule.cut == "whole":
            return [tensor] if self._ranks.rank == source else []
        if one.expert:
            return _gathered(tensor, source, parallel_state.get_expert_tensor_parallel_group())
        return _gathered(tensor, source, parallel_state.get_tensor_model_parallel_group())


def _rule(rules: Sequence[Rule], name: str) -> tuple[Rule, tuple[str, ...]]:
    """Return the rule of a parameter and its stored names."""
    for rule in rules:
        if (stored := rule.match(name)) is not None:
            return rule, stored
    raise WhetError(f"no rule of this model's family names Megatron's parameter {name}")


def _mark(parameter: Any, rule: Rule) -> None:
    """Mark a parameter that tensor parallel ranks split. Otherwise the gradient's norm counts that of one rank only.

    Megatron marks them when it draws them at random, which costs time and is left out here.
    """
    if rule.cut != "whole":
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = (1 if rule.cut == "columns" else 0), 1


def _whole_name(stage: Any, name: str) -> str:
    """Return the name of a parameter with its layer counted over all stages."""
    head, mark, tail = single_name(name).partition("decoder.layers.")
    if not mark:
        return name
    number, _, rest = tail.partition(".")
    return f"{head}{mark}{stage.decoder.layers[int(number)].layer_number - 1}.{rest}"


def _place(group: Any) -> Place:
    """Return this rank's place in a group."""
    return Place(group.rank(), group.size())


def _gathered(tensor: Tensor, source: int, group: Any) -> list[Tensor]:
    """Return the tensors of all ranks of a group, in order, on the rank `source`. Elsewhere: nothing."""
    if group.size() == 1:
        return [tensor]
    tensor = tensor.contiguous()
    receives = torch.distributed.get_rank() == source
    parts = [torch.empty_like(tensor) for _ in range(group.size())] if receives else None
    torch.distributed.gather(tensor, parts, source, group=group)
    return parts or []
