"""The section `lora` of a training backend: what it means, what is wrong with it, what it matches. Imports no torch."""

import re
from collections.abc import Collection, Iterator
from typing import Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, min_len

from whet.component import AdapterInfo, MemoryTerm, Problem
from whet.config.bounds import FACTOR, above, between
from whet.config.sections import Config
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError
from whet_training.weight_groups import pattern_problems


@frozen
class LoraConfig:
    """LoRA (Hu et al. 2021, arXiv:2106.09685): the weights W of the model are frozen, and W + s B A is trained, where A
    and B are two small matrices.
    """

    rank: int = field(default=8, validator=between(1, 65_536))
    """Rows of A and columns of B. More can learn more, and take more memory."""
    alpha: float = field(default=16.0, validator=above(0, FACTOR))
    """The scaling s is alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that the size of updates does not fall with the rank (Kalajdzievski 2023,
    arXiv:2312.03732)."""
    targets: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)))
    """Linear layers that get an adapter: names such as `q_proj`, which stand for all layers whose name ends so, or
    regular expressions for whole names in `transformers`, e.g. `.*layers\\.[0-3]\\..*`. Empty: all linear layers of the
    decoder layers. The head gets none."""
    experts: bool = False
    """Whether the weights of experts that are stacked in one tensor get adapters, too."""
    adapter: str = field(default="", metadata={"path": True})
    """Folder of an adapter in PEFT's format to start from. It must have the same rank, alpha and targets. The reference
    policy then has this adapter. A role that is not trained computes with it. Empty: A is random and B is zero."""
    export: Literal["merged", "adapter"] = "merged"
    """What an export is. `merged`: a model folder with the adapter added to the weights. `adapter`: the adapter alone,
    in PEFT's format."""


OF_ONE_MODEL = {"other_models": {"adapter": ""}}
"""Metadata of a field `lora`: what a role with a model of its own has in the place of the policy's adapter."""


def computed(lora: LoraConfig | None, trained: bool) -> LoraConfig | None:
    """Return the section where a model computes with adapters. One that is not trained does with an `adapter` alone."""
    return lora if lora is not None and (trained or lora.adapter) else None


def problems(lora: LoraConfig | None, config: Config, path: str) -> Iterator[Problem]:
    """Yield the problems of a section that stands at `path`. `None`: all weights are trained."""
    if lora is None:
        return
    for number, target in enumerate(lora.targets):
        yield from pattern_problems(target, f"{path}.targets.{number}")
    for name, role in config.roles.items() if lora.export == "adapter" and path == "backend.lora" else ():
        if role.sync_every:
            words = (
                f"is adapter, and the role {name} continues from exports, which must be whole models; set it to merged"
            )
            yield Problem(f"{path}.export", words)


EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
"""Names of layers that experts have in the place of linear layers."""


def unmatched(targets: Collection[str], names: Collection[str], owner: str) -> Iterator[tuple[int, str]]:
    """Yield the number of each target that matches none of the names of linear layers, and what is wrong.

    `owner`: the class of the model that has the layers.
    """
    for number, target in enumerate(targets):
        if not any(matches(target, name) for name in names):
            some = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            words = f"{target!r} matches no linear layer but the head of {owner}; its layers have {some}"
            of_experts = "; experts get adapters by `experts: true`, not by name" * (target in EXPERTS)
            yield number, words + of_experts


def chosen(targets: Collection[str], names: Collection[str], owner: str) -> list[str]:
    """Return the names of the linear layers that a target matches. Raises `ConfigError` if one matches none."""
    for number, words in unmatched(targets, names, owner):
        raise ConfigError(f"backend.lora.targets.{number}: {words}")
    return [name for name in names if any(matches(target, name) for target in targets)]


def matches(target: str, name: str) -> bool:
    """Return whether a target is a name, the end of it after a dot, or a regular expression for the whole of it."""
    return f".{name}".endswith(f".{target}") or re.fullmatch(target, name) is not None


def adapter_info(config: LoraConfig) -> AdapterInfo:
    """Return what a receiver must know of the adapter."""
    kinds = ("linear", "experts") if config.experts else ("linear",)
    return AdapterInfo(config.rank, config.alpha, config.rslora, kinds)


def adapter_memory(parameters: int, trained: bool) -> Iterator[MemoryTerm]:
    """Yield the memory of so many parameters of adapters on a rank."""
    if not trained:
        yield MemoryTerm("the adapter in float32", 4 * parameters)
        return
    lower = "lower backend.lora.rank"
    yield MemoryTerm("the adapter and its moments in float32", 12 * parameters, change=lower)
    yield MemoryTerm("gradients of the adapter in float32", 4 * parameters, kept_asleep=False, change=lower)


def adapter_parameters(config: LoraConfig, model: ModelInfo) -> int:
    """Return the number of parameters of an adapter of all linear layers of a decoder, estimated from its config.
    Stacked experts count, others do not. 0: the adapter is of other layers, or the config does not state their sizes.
    """
    found = model.config.get("text_config") or model.config
    hidden, mlp, heads = (found.get(key) or 0 for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    if config.targets or not (hidden and mlp and heads):
        return 0
    head = found.get("head_dim") or hidden // heads
    attention = 4 * hidden + 2 * head * (heads + (found.get("num_key_value_heads") or heads))
    feed_forward = 3 * (hidden + mlp)
    if model.experts:  # two stacked weights: gate and up in one, and down
        one = found.get("moe_intermediate_size") or mlp
        feed_forward = model.experts * (2 * hidden + 3 * one) if config.experts else 0
    return int(config.rank * found.get("num_hidden_layers", 0) * (attention + feed_forward))
