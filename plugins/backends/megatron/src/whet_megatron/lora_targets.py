"""Which stored weights of a model can get LoRA adapters, by its rules. Imports no torch and no Megatron."""

from collections.abc import Iterator, Sequence

from attrs import frozen

from whet.data.model_info import ModelInfo
from whet_megatron.architecture import Architecture, family, read
from whet_megatron.parallel import ParallelConfig
from whet_megatron.rules import Rule
from whet_training.lora_config import LoraConfig, chosen

CUTS = ("rows", "columns", "qkv", "gated")


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


@frozen
class Adapted:
    """A layer of Megatron with adapters, as a rank holds it."""

    rule: Rule
    count: int
    """Adapters: one for each stored weight that has one."""
    inputs: int
    outputs: int
    parameters: int
    """Numbers in all A and B of this rank."""


def adapted(config: LoraConfig, info: ModelInfo, sizes: ParallelConfig, stage: int) -> Iterator[Adapted]:
    """Yield the layers with adapters that a rank of a pipeline stage holds. Raises `ConfigError` as `chosen` does."""
    model, found = read(info), family(info)
    assert found is not None
    names = linears(found.rules, model)
    targets = set(chosen(config.targets, names, info.architecture) if config.targets else names)
    for rule in filter(is_adaptable, found.rules):
        inputs, outputs = _sizes(rule, model)
        split = (sizes.tensor, 1) if rule.cut == "columns" else (1, sizes.tensor)
        for layer, stored in enumerate(of_rule(rule, model)):
            if layer // (model.layers // sizes.stages) % sizes.pipeline == stage and targets.intersection(stored):
                rows = [out // split[1] for name, out in zip(stored, outputs, strict=True) if name in targets]
                own = config.rank * (len(rows) * inputs // split[0] + sum(rows))
                yield Adapted(rule, len(rows), inputs // split[0], sum(outputs) // split[1], own)


def _sizes(rule: Rule, model: Architecture) -> tuple[int, tuple[int, ...]]:
    """Return the inputs of a linear layer, and the outputs of each of its stored weights."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if rule.cut == "qkv":
        return model.hidden, (query, key, key)
    if rule.cut == "columns":
        return (query if rule.name.endswith("linear_proj.weight") else model.mlp), (model.hidden,)
    return model.hidden, (model.mlp,) * len(rule.stored)
