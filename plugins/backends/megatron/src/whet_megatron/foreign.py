"""Weights from a checkpoint that Megatron-LM, or whatever else uses Megatron Core, has written as `torch_dist`.

The backend's ranks load the parts that they hold, with Megatron's own code. `stored` yields the weights under the names
of a model folder, one at a time, in one process without Megatron. Neither reads the objects beside the tensors, which
are pickles.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from whet.data.model_info import ModelInfo
from whet.errors import CheckpointError
from whet_megatron import architecture, cuts
from whet_megatron.architecture import Architecture
from whet_megatron.index import FILE, read_index, read_slice
from whet_megatron.parts import load_parts
from whet_megatron.rules import VALUE_HEAD, Rule
from whet_megatron.weights import ModelWeights

TRACKER = "latest_checkpointed_iteration.txt"
HEAD, HEAD_STORED = VALUE_HEAD.name, VALUE_HEAD.stored[0]
VOCABULARY = ("embedding.word_embeddings.weight", HEAD)
"""Parameters whose rows are padded as the program that saved them liked."""
PARTS = ("embedding.", "decoder.", "output_layer.")
"""How the names of the parameters begin that a language model computes with."""

NORMS = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
)
"""Norms are of the matrix after them, or modules of their own; in layers with experts that differs between modules."""


@frozen
class Part:
    """A parameter of a model as a checkpoint has it."""

    rule: Rule
    name: str
    """Of the tensor that has it."""
    lead: tuple[int, ...]
    """Its numbers in the first dimensions of that tensor."""
    layer: int
    expert: int

    @property
    def stored(self) -> tuple[str, ...]:
        """Return its names in the model folder."""
        return tuple(one.format(layer=self.layer, expert=self.expert) for one in self.rule.stored)


class Foreign:
    """A checkpoint. Its optimizer is not read."""

    def __init__(self, path: str) -> None:
        """Read the index. Raises `CheckpointError`."""
        self.folder = tensors_of(Path(path))
        self.index = read_index(self.folder)
        self.shapes = {
            name: tuple(what.size) for name, what in self.index.state_dict_metadata.items() if hasattr(what, "chunks")
        }
        self.apart = any(name.startswith("decoder.layers.0.") for name in self.shapes)
        """Whether each layer has names of its own. Else layers are the first dimension of common tensors."""

    def parameters(self, arch: Architecture, rules: Sequence[Rule]) -> Iterator[Part]:
        """Yield the parameters of a model that the checkpoint has."""
        for rule in rules:
            for layer, expert in arch.numbers(rule):
                part = Part(rule, *self._place(rule, layer, expert), layer, expert)
                if part.name in self.shapes:
                    yield part

    def _place(self, rule: Rule, layer: int, expert: int) -> tuple[str, tuple[int, ...]]:
        name = rule.name.replace(".local_experts.{expert}.", ".experts.")
        experts = (expert,) if "{expert}" in rule.name else ()
        if self.apart or "{layer}" not in name:
            return self.known(name.format(layer=layer)), experts
        return self.known(name.replace(".layers.{layer}.", ".layers.")), (layer, *experts)

    def known(self, name: str) -> str:
        """Return the name under which the checkpoint has a tensor, which depends on the modules that saved it."""
        others = (name.removesuffix(old) + new for old, new in NORMS if name.endswith(old))
        return next((one for one in (name, *others) if one in self.shapes), name)

    def refuse_others(self, wanted: Mapping[str, tuple[int, ...]], vocabulary: int) -> None:
        """Raise `CheckpointError` if tensors lack or have other shapes. Rows of the vocabulary may be padded."""
        for name, shape in wanted.items():
            found = self.shapes.get(name)
            if found is None:
                raise CheckpointError(f"{self.folder} holds no {name}; is it of the model in model.path?")
            rows = name in VOCABULARY and shape[0] >= vocabulary
            if (found[1:] != shape[1:] or found[0] < vocabulary) if rows else found != shape:
                words = f"[{vocabulary} or more, {shape[1]}]" if rows else f"{list(shape)}"
                raise CheckpointError(
                    f"{self.folder} holds {name} as {list(found)}, and config.json in model.path asks for {words}"
                )

    def refuse_more(self, parts: Sequence[Part]) -> None:
        """Raise `CheckpointError` if the checkpoint has parameters that are not among the model's: they would be lost.

        Parts that no model here has, such as layers that predict further tokens, are not looked at.
        """
        known = {part.name for part in parts}
        more = [name for name in self.shapes if name.startswith(PARTS) and name not in known]
        if more:
            words = f"{', '.join(sorted(more)[:3])}, {len(more)} in all" if len(more) > 1 else more[0]
            raise CheckpointError(
                f"{self.folder} holds {words}, which the model of config.json in model.path lacks; is it of that model?"
            )


def tensors_of(path: Path) -> Path:
    """Return the folder with the index: this one, the iteration that its tracker names, or that of a run of whet."""
    tracker = path / TRACKER
    if tracker.is_file():
        word = tracker.read_text(encoding="utf-8").strip()
        path = path / (f"iter_{int(word):07d}" if word.isdigit() else "release")
    for folder in (path, path / "megatron", path / "backend" / "megatron"):
        if (folder / FILE).is_file():
            return folder
    raise CheckpointError(f"{path} is no checkpoint of Megatron in the format torch_dist: it holds no {FILE}")


@torch.no_grad()
def load(path: str, weights: ModelWeights, new_head: Tensor | None = None) -> None:
    """Load the weights of a checkpoint into the stages of this rank. Every rank must take part.

    A value head that the checkpoint lacks becomes `new_head`. Raises `CheckpointError` if it is of another model.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    checkpoint, arch = Foreign(path), weights.architecture
    rules = [rule for rule in weights.rules if arch.has(rule) or (weights.value and rule.name == HEAD)]
    parts = list(checkpoint.parameters(arch, rules))
    checkpoint.refuse_more(parts)
    draws = new_head is not None and checkpoint.shapes.get(HEAD) != tuple(new_head.shape)
    wanted: dict[str, Any] = {}
    for number, stage in enumerate(weights.stages):
        described = stage.sharded_state_dict(metadata={"non_homogeneous_layers": checkpoint.apart})
        for name, part in described.items():
            if not isinstance(part, ShardedObject) and not (draws and name == HEAD):
                wanted[f"{number}/{name}"] = part

    def check(tensors: Sequence[Any]) -> None:
        for one in tensors:
            one.key = checkpoint.known(one.key)
        checkpoint.refuse_others({one.key: tuple(one.global_shape) for one in tensors}, arch.vocabulary)

    found = load_parts(wanted, checkpoint.folder, check)
    for number, stage in enumerate(weights.stages):
        mine = {name.removeprefix(f"{number}/"): one for name, one in found.items() if name.startswith(f"{number}/")}
        if draws and new_head is not None and HEAD in dict(stage.named_parameters()):
            mine[HEAD] = new_head
        missing, _ = stage.load_state_dict(mine, strict=False)
        if lost := [name for name in missing if not name.endswith("_extra_state")]:
            raise CheckpointError(f"{checkpoint.folder} gave no {', '.join(lost[:4])}")
    weights.names = frozenset(part.stored[0] for part in parts) | ({HEAD_STORED} if draws else frozenset())


def stored(path: str, info: ModelInfo) -> Iterator[tuple[str, Tensor]]:
    """Yield (stored name, tensor) of a checkpoint, in its dtypes. At most one parameter is in memory at a time.

    Raises `CheckpointError` if it is of another model.
    """
    checkpoint, arch, family = Foreign(path), architecture.read(info), architecture.family(info)
    assert family is not None
    rules = [rule for rule in family.rules if arch.has(rule)]
    parts = list(checkpoint.parameters(arch, rules))
    for rule in rules:
        count = sum(part.rule is rule for part in parts)
        wanted = len(list(arch.numbers(rule)))
        if count != wanted:
            words = f"holds {count} of {wanted} parameters {rule.name}"
            raise CheckpointError(f"{checkpoint.folder} {words}; is it of the model whose config.json is given?")
    checkpoint.refuse_more(parts)
    checkpoint.refuse_others(_whole_shapes(checkpoint, parts, arch), arch.vocabulary)
    for part in parts:
        whole = read_slice(checkpoint.folder, checkpoint.index, part.name, part.lead)
        yield from zip(part.stored, (one.contiguous() for one in cuts.join(part.rule.cut, [whole], arch)), strict=True)


def _whole_shapes(checkpoint: Foreign, parts: Sequence[Part], arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return what the config says of the shapes of tensors, as far as whet computes with it."""
    wanted: dict[str, tuple[int, ...]] = {}
    for part in parts:
        shape = list(checkpoint.shapes[part.name])
        sizes = (arch.experts,) if checkpoint.apart else (arch.layers, arch.experts)
        shape[: len(part.lead)] = sizes[: len(part.lead)]
        if part.rule.cut == "qkv":
            shape[len(part.lead)] = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
        if part.rule.cut == "vocabulary":
            shape = [arch.vocabulary, arch.hidden]
        wanted[part.name] = tuple(shape)
    return wanted
