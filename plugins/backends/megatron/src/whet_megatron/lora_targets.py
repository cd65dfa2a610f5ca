"""Which stored weights of a model can get LoRA adapters, by its rules. Imports no torch and no Megatron."""

from collections.abc import Iterator, Sequence

from whet_megatron.architecture import Architecture
from whet_megatron.rules import Rule

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
