"""The parameters of a rank by rules: read from a model folder, and streamed under their stored names."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
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
    others: tuple[tuple[str, ...], ...] = ()
    """Of an expert: the stored names of the experts that the ranks of the expert group hold in its place."""


class ModelWeights:
    """The parameters of the stages of one rank."""

    def __init__(
        self, stages: Sequence[Any], architecture: Architecture, info: ModelInfo, ranks: Ranks, *, value: bool
    ) -> None:
        self.stages, self._arch, self._ranks = tuple(stages), architecture, ranks
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
        mine, others = name, tuple[tuple[str, ...], ...]()
        head, mark, tail = name.partition(".local_experts.")
        if mark:
            number, _, rest = tail.partition(".")
            held = self._arch.experts // self._ranks.sizes.expert
            names = [f"{head}{mark}{int(number) + rank * held}.{rest}" for rank in range(self._ranks.sizes.expert)]
            mine = names[_expert_rank()]
            others = tuple(_rule(rules, one)[1] for one in names)
        rule, stored = _rule(rules, mine)
        if self._arch.tied and rule.stored == ("lm_head.weight",):
            rule = evolve(rule, stored=("model.embed_tokens.weight",))
            stored = rule.stored
        self.ruled[mine] = Ruled(parameter, rule, stored, others)
        _mark(parameter, rule)

    def _first_names(self, there: frozenset[str]) -> Iterator[str]:
        """Yield the first stored name of each parameter of all ranks."""
        numbers = {"layer": range(self._arch.layers), "expert": range(self._arch.experts)}
        for rule in self.rules:
            for layer, expert in product(*(numbers[key] if f"{{{key}}}" in rule.name else [0] for key in numbers)):
                name = rule.stored[0].format(layer=layer, expert=expert)
                if name in there or rule == VALUE_HEAD:
                    yield name

    def place(self, one: Ruled) -> Place:
        """Return this rank's place among those that share a parameter."""
        if one.others:
            return Place(*_expert_tensor_place())
        return self.tensor_place

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""
        return self._ranks.device

    @property
    def tensor_place(self) -> Place:
        """Return this rank's place among those that share the matrices outside of experts."""
        return Place(self._ranks.coordinates.tensor, self._ranks.sizes.tensor)

    @torch.no_grad()
    def load(self, folder: str, new_head: Tensor | None = None) -> None:
        """Read this rank's part of each weight. A value head that the folder lacks becomes `new_head`."""
        with stored_weights(folder) as weights:
            self.names = frozenset(self._first_names(weights.names))
            for one in self.ruled.values():
                if new_head is not None and one.rule == VALUE_HEAD and one.stored[0] not in weights.names:
                    one.parameter.copy_(new_head)
                else:
                    self._read(weights, one, folder)

    def _read(self, weights: StoredWeights, one: Ruled, folder: str) -> None:
        slices = [weights.slices(name) for name in one.stored]
        shape, place = tuple(one.parameter.shape), self.place(one)
        self._refuse_others(weights, one, folder)
        found = cuts.take(one.rule.cut, slices, shape, place, self._arch)
        if tuple(found.shape) != shape:
            words = f"{' and '.join(one.stored)} hold {tuple(found.shape)} of this rank's part, wanted {shape}"
            raise WhetError(f"model.path: the weights in {folder} hold another shape than config.json says: {words}")
        one.parameter.copy_(found)

    def _refuse_others(self, weights: StoredWeights, one: Ruled, folder: str) -> None:
        """Raise `WhetError` if the stored weights have other sizes than the config says."""
        wanted = cuts.stored_shapes(one.rule.cut, tuple(one.parameter.shape), self.place(one), self._arch)
        for name, shape in zip(one.stored, wanted, strict=True):
            if (found := weights.shape(name)) != shape:
                raise WhetError(
                    f"model.path: the weights in {folder} hold {name} as {list(found)}, and config.json says "
                    f"{list(shape)}; is config.json that of these weights?"
                )

    @torch.no_grad()
    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (stored name, whole tensor) of all stages on rank 0. Every rank must iterate to the end.

        Ranks of one stage gather a parameter at a time, and hand it on to rank 0. Elsewhere nothing is yielded.
        """
        stages = self._ranks.sizes.pipeline
        for stage in range(stages):
            mine = self._ranks.coordinates.pipeline == stage
            stream = self._of_stage() if mine else iter(())
            if stage == 0:
                for name, tensor in stream:
                    if self._ranks.rank == 0:
                        yield name, tensor
            else:
                yield from self._handed_on(stage, stream)

    def _of_stage(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of this rank's stage, on each of its ranks. A tied weight is that of the first stage."""
        for one in self.ruled.values():
            if one.rule.cut == "vocabulary" and self._arch.tied and one.rule.name == "output_layer.weight":
                continue
            for names, parts in self._parts(one):
                yield from zip(names, cuts.join(one.rule.cut, parts, self._arch), strict=True)

    def _parts(self, one: Ruled) -> Iterator[tuple[tuple[str, ...], list[Tensor]]]:
        """Yield stored names and the parts of all ranks that share a parameter; of an expert, those of every rank."""
        from megatron.core import parallel_state

        tensor = self.computing(one)
        if not one.others:
            whole = one.rule.cut == "whole"
            group = None if whole else parallel_state.get_tensor_model_parallel_group()
            yield one.stored, _gathered(tensor, group)
            return
        parts = _gathered(tensor, parallel_state.get_expert_tensor_parallel_group())
        every = [_gathered(part, parallel_state.get_expert_model_parallel_group()) for part in parts]
        for names, of_expert in zip(one.others, zip(*every, strict=True), strict=True):
            yield names, list(of_expert)

    def _handed_on(self, stage: int, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of another stage on rank 0."""
        mine = self._ranks.coordinates
        sends = mine.data == mine.tensor == mine.context == 0 and mine.pipeline == stage
        source = next(
            rank for rank in range(self._ranks.size)
            if self._ranks.grid.coordinates(rank) == evolve(self._ranks.grid.coordinates(0), pipeline=stage)
        )  # fmt: skip
        if self._ranks.rank == 0:
            yield from _received(source, self._ranks.device)
        elif sends:
            _send(stream, self._ranks.device)
        else:
            for _ in stream:
                pass


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


def _expert_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_expert_model_parallel_rank())


def _expert_tensor_place() -> tuple[int, int]:
    from megatron.core import parallel_state

    group = parallel_state.get_expert_tensor_parallel_group()
    return group.rank(), group.size()


def _gathered(tensor: Tensor, group: Any) -> list[Tensor]:
    """Return the tensors of all ranks of a group, in order."""
    if group is None or group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return parts


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _send(stream: Iterator[tuple[str, Tensor]], device: torch.device) -> None:
    """Send weights to rank 0, each after its name and shape."""
    for name, tensor in stream:
        text = name.encode()
        header = torch.tensor([len(text), DTYPES.index(tensor.dtype), tensor.ndim], device=device)
        torch.distributed.send(header, 0)
        torch.distributed.send(torch.tensor([*tensor.shape, *text], device=device), 0)
        torch.distributed.send(tensor.contiguous(), 0)
    torch.distributed.send(torch.zeros(3, dtype=torch.int64, device=device), 0)


def _received(source: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that another rank sends."""
    while True:
        header = torch.empty(3, dtype=torch.int64, device=device)
        torch.distributed.recv(header, source)
        length, dtype, dimensions = header.tolist()
        if not length:
            return
        described = torch.empty(dimensions + length, dtype=torch.int64, device=device)
        torch.distributed.recv(described, source)
        numbers = described.tolist()
        tensor = torch.empty(numbers[:dimensions], dtype=DTYPES[dtype], device=device)
        torch.distributed.recv(tensor, source)
        yield bytes(numbers[dimensions:]).decode(), tensor
