"""Which weights of a model can get LoRA adapters, by its rules. Imports no torch and no Megatron."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from attrs import frozen

from whet.data.model_info import ModelInfo
from whet.errors import ConfigError
from whet_megatron.architecture import Architecture, family, read
from whet_megatron.parallel import ParallelConfig
from whet_megatron.rules import Rule
from whet_training.lora_config import LoraConfig, chosen
from whet_weights import adapter as peft

CUTS = ("rows", "columns", "qkv", "gated")


@frozen
class Weight:
    """A weight of `transformers` that gets an adapter."""

    module: str
    """The module that has the adapter in PEFT's files."""
    side: Literal["out", "in"]
    """What ranks split of it: its outputs, or its inputs."""
    rows: int
    """Outputs."""
    columns: int
    """Inputs."""
    experts: int = 0
    """Experts whose matrices it stacks. 0: it is one matrix."""
    fused: int = 1
    """Matrices of an expert among its rows, each of which ranks split: gate and up are 2."""


def is_adaptable(rule: Rule) -> bool:
    """Return whether a rule is of a linear layer that every token passes, in a decoder layer. Experts are none."""
    inside = "{layer}" in rule.name and "{expert}" not in rule.name
    return inside and rule.cut in CUTS and rule.name.endswith(".weight")


def of_rule(rule: Rule, model: Architecture) -> Iterator[tuple[str, ...]]:
    """Yield the names in `transformers` of the linear layers that a rule makes one of, for each decoder layer."""
    for layer in range(model.layers):
        yield tuple(name.format(layer=layer).removesuffix(".weight") for name in rule.stored)


def linears(rules: Sequence[Rule], model: Architecture) -> list[str]:
    """Return the names in `transformers` of all linear layers that can get an adapter."""
    return [name for rule in rules if is_adaptable(rule) for names in of_rule(rule, model) for name in names]


def has_experts(rules: Sequence[Rule]) -> bool:
    """Return whether a model has experts that can get adapters."""
    return any(rule.stacked for rule in rules)


def no_experts(owner: str) -> str:
    """Return what is wrong with `lora.experts` for a model without such experts. `owner`: the class of the model."""
    return f"is true, and {owner} has no experts that can get adapters; leave it out"


def adapted_weights(config: LoraConfig, rules: Sequence[Rule], model: Architecture, owner: str) -> dict[str, Weight]:
    """Return the weights of all stages that get an adapter, by name. `owner`: the class of the model.

    Raises `ConfigError` if a target matches nothing, or if there are no experts to adapt.
    """
    names, found = linears(rules, model), dict[str, Weight]()
    wanted = set(chosen(config.targets, names, owner) if config.targets else names)
    for rule in filter(is_adaptable, rules):
        columns, rows = sizes_of(rule, model)
        for stored in of_rule(rule, model):
            own = [(name, size) for name, size in zip(stored, rows, strict=True) if name in wanted]
            found |= {f"{name}.weight": Weight(name, _side(rule), size, columns) for name, size in own}
    if config.experts and not has_experts(rules):
        raise ConfigError(f"backend.lora.experts: {no_experts(owner)}")
    for layer in range(model.layers if config.experts else 0):
        found |= _of_experts(rules, model, layer)
    return found


def _of_experts(rules: Sequence[Rule], model: Architecture, layer: int) -> Iterator[tuple[str, Weight]]:
    """Yield the names of the stacked weights of the experts of a layer, and the weights."""
    of = {rule.stacked.format(layer=layer): rule for rule in rules if rule.stacked}
    owner, names = next(iter(of)).rpartition(".")[0], [name.rpartition(".")[2] for name in of]
    depths = [owner + peft.WRAPPED * depth for depth in range(len(names))]
    for module, name in peft.targets(depths, {owner: names}):
        columns, rows = sizes_of(of[name], model)
        yield name, Weight(module, _side(of[name]), sum(rows), columns, model.experts, len(rows))


def _side(rule: Rule) -> Literal["out", "in"]:
    return "in" if rule.cut == "columns" else "out"


@frozen
class Adapted:
    """A layer of Megatron with adapters, as a rank holds it: a linear layer, or one of the layers of its experts."""

    rule: Rule
    count: int
    """Adapters of a linear layer, or of an expert: one for each weight that has one."""
    inputs: int
    outputs: int
    parameters: int
    """Numbers in all A and B of this rank."""
    experts: int = 0
    """Experts of this rank. 0: it is a linear layer."""


def adapted(config: LoraConfig, info: ModelInfo, sizes: ParallelConfig, stage: int) -> Iterator[Adapted]:
    """Yield the layers with adapters that a rank of a pipeline stage holds. Raises `ConfigError` as `adapted_weights`
    does.
    """
    model, found = read(info), family(info)
    assert found is not None
    weights = adapted_weights(config, found.rules, model, info.architecture)
    for layer in range(model.layers):
        if layer // (model.layers // sizes.stages) % sizes.pipeline == stage:
            for rule in found.rules:
                yield from _adapted(config.rank, rule, layer, weights, model, sizes)


def _adapted(
    rank: int, rule: Rule, layer: int, weights: Mapping[str, Weight], model: Architecture, sizes: ParallelConfig
) -> Iterator[Adapted]:
    """Yield the layer of Megatron that a rule makes, if it has adapters."""
    stored = (rule.stacked,) if rule.stacked else rule.stored if is_adaptable(rule) else ()
    own = [weights[name] for name in (one.format(layer=layer) for one in stored) if name in weights]
    if not own:
        return
    inputs, outputs = sizes_of(rule, model)
    ranks, held = (sizes.expert_tensor, model.experts // sizes.expert) if rule.stacked else (sizes.tensor, 0)
    split = (ranks, 1) if own[0].side == "in" else (1, ranks)
    numbers = sum(one.columns // split[0] + one.rows // split[1] for one in own) * max(1, held)
    yield Adapted(rule, len(own), inputs // split[0], sum(outputs) // split[1], rank * numbers, held)


def sizes_of(rule: Rule, model: Architecture) -> tuple[int, tuple[int, ...]]:
    """Return the inputs of a linear layer, of one expert if it is of experts, and the outputs of each stored weight."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = model.expert_mlp if "{expert}" in rule.name else model.mlp
    if rule.cut == "qkv":
        return model.hidden, (query, key, key)
    if rule.cut == "columns":
        return (query if rule.name.endswith("linear_proj.weight") else width), (model.hidden,)
    return model.hidden, (width,) * len(rule.stored)
