"""How the stored weights of a Hugging Face model become Megatron's parameters, as tables. Imports no torch.

A rule names one parameter of Megatron and the stored weights that it is made of. `{layer}` and `{expert}` stand for
numbers. The cut says how the stored weights are fused, and which part tensor parallel ranks hold:

    whole        every rank holds all of it: norms, routers
    rows         ranks split the rows (column parallel: the outputs of the layer)
    columns      ranks split the columns (row parallel: the inputs of the layer)
    qkv          queries, keys and values; for each group of heads its queries, its key and its value follow each other
    gated        gate and up; each rank holds its rows of the gate, then its rows of up
    vocabulary   rows, padded with zeros to equally many on each rank

`whet_megatron.cuts` computes them in both directions. Norms before a matrix have the names that Transformer Engine
gives them, as parts of the matrix's layer.
"""

import re
from typing import Literal

from attrs import field, frozen

Cut = Literal["whole", "rows", "columns", "qkv", "gated", "vocabulary"]


@frozen
class Rule:
    """One parameter of Megatron."""

    name: str
    """Its name, with layers and experts counted over all ranks."""
    stored: tuple[str, ...]
    """The names of the stored weights that it is made of."""
    cut: Cut = "whole"
    stacked: str = ""
    """The name in `transformers` of the tensor that stacks it for all experts of a layer. Empty: it is of no expert."""
    pattern: re.Pattern[str] = field(init=False, repr=False)

    @pattern.default
    def _compiled(self) -> re.Pattern[str]:
        parts = re.split(r"\{(\w+)\}", self.name)
        return re.compile("".join(f"(?P<{one}>\\d+)" if n % 2 else re.escape(one) for n, one in enumerate(parts)))

    def match(self, name: str) -> tuple[str, ...] | None:
        """Return the stored names of a parameter with this name. None: the rule is of another parameter."""
        found = self.pattern.fullmatch(name)
        return None if found is None else tuple(one.format(**found.groupdict()) for one in self.stored)


_LAYER, _STORED = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION = tuple(f"{_STORED}self_attn.{one}_proj" for one in "qkv")

OUTER = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocabulary"),
)
"""What lies outside of the layers."""
VALUE_HEAD = Rule("output_layer.weight", ("score.weight",))
"""The head of a sequence classifier with one label, in place of the head of a language model."""
ATTENTION = (
    Rule(f"{_LAYER}self_attention.linear_qkv.layer_norm_weight", (f"{_STORED}input_layernorm.weight",)),
    Rule(f"{_LAYER}self_attention.linear_qkv.weight", tuple(f"{one}.weight" for one in _ATTENTION), "qkv"),
    Rule(f"{_LAYER}self_attention.linear_qkv.bias", tuple(f"{one}.bias" for one in _ATTENTION), "qkv"),
    Rule(f"{_LAYER}self_attention.q_layernorm.weight", (f"{_STORED}self_attn.q_norm.weight",)),
    Rule(f"{_LAYER}self_attention.k_layernorm.weight", (f"{_STORED}self_attn.k_norm.weight",)),
    Rule(f"{_LAYER}self_attention.linear_proj.weight", (f"{_STORED}self_attn.o_proj.weight",), "columns"),
)
MLP = (
    Rule(f"{_LAYER}mlp.linear_fc1.layer_norm_weight", (f"{_STORED}post_attention_layernorm.weight",)),
    Rule(
        f"{_LAYER}mlp.linear_fc1.weight",
        (f"{_STORED}mlp.gate_proj.weight", f"{_STORED}mlp.up_proj.weight"),
        "gated",
    ),
    Rule(f"{_LAYER}mlp.linear_fc2.weight", (f"{_STORED}mlp.down_proj.weight",), "columns"),
)


def experts(router: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the rules of layers with experts, from stored names within a layer."""
    inner, stacked = f"{_LAYER}mlp.experts.local_experts.{{expert}}.", f"{_STORED}mlp.experts."
    return (
        Rule(f"{_LAYER}pre_mlp_layernorm.weight", (f"{_STORED}post_attention_layernorm.weight",)),
        Rule(f"{_LAYER}mlp.router.weight", (f"{_STORED}{router}",)),
        Rule(f"{inner}linear_fc1.weight", (f"{_STORED}{gate}", f"{_STORED}{up}"), "gated", f"{stacked}gate_up_proj"),
        Rule(f"{inner}linear_fc2.weight", (f"{_STORED}{down}",), "columns", f"{stacked}down_proj"),
    )


DENSE = (*OUTER, *ATTENTION, *MLP)
"""Llama, Qwen2, Qwen3."""
QWEN_MOE = (
    *OUTER,
    *ATTENTION,
    *experts(
        "mlp.gate.weight",
        *(f"mlp.experts.{{expert}}.{one}_proj.weight" for one in ("gate", "up", "down")),
    ),
)
MIXTRAL = (
    *OUTER,
    *ATTENTION,
    *experts(
        "block_sparse_moe.gate.weight",
        *(f"block_sparse_moe.experts.{{expert}}.{one}.weight" for one in ("w1", "w3", "w2")),
    ),
)
