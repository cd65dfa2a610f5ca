"""The page that says which test runs each algorithm with each backend, layout of ranks, adapter and generator.

A test says by the marker `supports` which cells it runs. What no test runs, the plan refuses, or else the page says so.
`python docs/support.py --collect` prints the tests of each cell, as pytest collects them.
"""

import functools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from whet.component import AlgorithmFacts, resolve
from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.plugins.registry import Registry
from whet_testing.combinations import Combination, reasons

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/test_support.py",)
"""Files with tests that have the marker."""
DENSE: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 192, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
MIXED: Mapping[str, Any] = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192,
}  # fmt: skip
LORA: Mapping[str, Any] = {"rank": 4}


@frozen
class Layout:
    """A backend, and how its ranks share the model."""

    backend: str
    name: str
    ranks: int = 1
    sizes: Mapping[str, Any] = field(factory=dict, hash=False)
    """The section `parallel`."""
    experts: bool = False
    """Whether the model is a mixture of experts."""


LAYOUTS = (
    Layout("fsdp2", "none"),
    Layout("fsdp2", "data 2", 2),
    Layout("fsdp2", "copies 2", 2, {"replicate": 2}),
    Layout("fsdp2", "tensor 2", 2, {"tensor": 2}),
    Layout("fsdp2", "context 2", 2, {"context": 2}),
    Layout("fsdp2", "expert 2", 2, {"expert": 2}, experts=True),
    Layout("fsdp2", "data 2 x tensor 2", 4, {"tensor": 2}),
    Layout("megatron", "none"),
    Layout("megatron", "data 2", 2),
    Layout("megatron", "tensor 2", 2, {"tensor": 2}),
    Layout("megatron", "tensor 2, sequence", 2, {"tensor": 2, "sequence": True}),
    Layout("megatron", "pipeline 2", 2, {"pipeline": 2}),
    Layout("megatron", "pipeline 2, virtual 2", 2, {"pipeline": 2, "virtual": 2}),
    Layout("megatron", "context 2", 2, {"context": 2}),
    Layout("megatron", "expert 2", 2, {"expert": 2}, experts=True),
    Layout("megatron", "tensor 2, sequence x pipeline 2", 4, {"tensor": 2, "sequence": True, "pipeline": 2}),
)


@frozen
class Cell:
    """One cell of the page."""

    algorithm: str
    layout: Layout
    lora: bool
    generator: str = ""
    """Empty: the algorithm learns from data files."""

    @property
    def name(self) -> str:
        """Return the name of the cell in the ids of tests."""
        words = [self.algorithm, self.layout.backend, self.layout.name, "lora" if self.lora else "", self.generator]
        return ", ".join(word for word in words if word)


def cells(registry: Registry, algorithms: Iterable[str] = (), generators: Iterable[str] = ()) -> Iterator[Cell]:
    """Yield all cells of algorithms and generators, of all if none are given."""
    generators = sorted(generators or registry.offers("generators"))
    for algorithm in sorted(algorithms or registry.offers("algorithms")):
        online = "rollouts" in facts_of(algorithm, registry).inputs
        for layout in LAYOUTS:
            for lora in (False, True):
                yield from (Cell(algorithm, layout, lora, one) for one in (generators if online else [""]))


def facts_of(algorithm: str, registry: Registry) -> AlgorithmFacts:
    """Return the facts of an algorithm at its defaults."""
    component = registry.find("algorithms", algorithm).component
    config = structure({}, component.config, registry)
    found = resolve(component.facts)(config, ModelInfo("model", dict(DENSE)))
    assert isinstance(found, AlgorithmFacts)
    return found


def sections(cell: Cell, registry: Registry) -> dict[str, Any]:
    """Return the sections of a config that runs a cell, with the roles that the algorithm asks for."""
    layout, needs = cell.layout, facts_of(cell.algorithm, registry).roles
    head = {"head": "value"} if cell.algorithm == "rm" else {"reference": True}
    own = {"use": layout.backend, "parallel": dict(layout.sizes)}
    backend = {**own, **head, **({"lora": dict(LORA)} if cell.lora else {})}
    roles = {name: {**own, **({"head": "value"} if "values" in need.outputs else {})} for name, need in needs.items()}
    group = ["backend", *roles]
    found = {
        "model": {"path": "model"},
        "backend": backend,
        "cluster": {
            "ranks": dict.fromkeys(group, layout.ranks), "threads": dict.fromkeys(group, 1), "colocate": [group],
        },
        **({"roles": roles} if roles else {}),
    }  # fmt: skip
    return {**found, "generator": {"use": cell.generator} if cell.generator else None}


@functools.cache
def refusals(cell: Cell, registry: Registry) -> tuple[str, ...]:
    """Return why the plan refuses a cell. Empty: it does not."""
    base = {
        **sections(cell, registry), "run": {"folder": "run", "steps": 2}, "rollout": {"max_tokens": 4},
        "environments": [{"use": "arithmetic"}], "data": {"train": [{"path": "data.jsonl"}]},
    }  # fmt: skip
    model = ModelInfo("model", dict(MIXED if cell.layout.experts else DENSE))
    return tuple(reasons(Combination(cell.algorithm), base, registry, model))
