"""The page that says which test runs each algorithm with each backend, layout of ranks, adapter and generator.

A test says by the marker `supports` which cell it runs. What no test runs, the plan refuses, or else the page says so.
`python docs/support.py` prints the tests of each cell, as pytest collects them, and their parameters.
"""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from whet.data.model_info import ModelInfo
from whet.plugins.registry import Registry
from whet_testing.combinations import Combination, asked_roles, covering, facts_of, reasons

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/test_support.py",)
"""Files with tests that have the marker."""
DENSE: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384, "hidden_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 384, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
MIXED: Mapping[str, Any] = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384,
}  # fmt: skip
ENGINES = ("vllm", "sglang")
"""Generators on an engine that no plugin installs."""
LORA: Mapping[str, Any] = {"rank": 4}
NO_TEST = "no test"
HEAD = """\
# What runs with what

Each algorithm with each backend, each way in which its ranks share the model, with full training and with LoRA, and for
algorithms that learn from rollouts with each generator. A cell has one of these:

- a letter: the test below the table runs two steps of it, and CELL stands for the names of its row and column. A letter
  in parentheses: only the session `support` runs the test. Another session runs the others, too: from data files and
  with `hf` each pair of an algorithm and a layout of up to two ranks, and with other generators each pair of an
  algorithm and a backend, with one of full training and LoRA.
- a number: the plan refuses it, with the reason below the table.
- *no test*: it fits the plan, and no test runs it.

The tests run on CPUs, with small random models, and skip where what they need is not installed. In each run with a
generator, the probe compares its logprobs with the backend's after the first two weight syncs. vLLM and SGLang want an
older transformers than `copies 2` and `expert 2` of `fsdp2`, whose backends have a Python of their own beside them.
With `expert 2`, LoRA adapts the experts, too.
Losses, advantages and filters are in [Combinations](combinations.md)."""


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
    def needs(self) -> str:
        """Return what it needs besides whet, its plugins and what they install. Empty: nothing."""
        if self.generator in ENGINES:
            return self.generator
        return "megatron" if "megatron" in (self.layout.backend, self.generator) else ""

    @property
    def sessions(self) -> tuple[str, str]:
        """Return the session of nox that runs it if it is one of `always`, and the session that runs it in any case."""
        often = {"": "tests", "megatron": "backends(megatron)"}.get(self.needs, f"engines({self.needs})")
        return often, f"support({self.needs or 'megatron'})"

    @property
    def in_place(self) -> bool:
        """Return whether the generator computes with the weights of the backend, in its processes."""
        return self.generator == "megatron" == self.layout.backend and not self.lora

    @property
    def name(self) -> str:
        """Return the name of the cell in the ids of tests."""
        words = [self.algorithm, self.layout.backend, self.layout.name, "lora" if self.lora else "", self.generator]
        return ", ".join(word for word in words if word)

    def pairs(self) -> set[Any]:
        """Return the pairs of choices that it runs."""
        where: Any = self.layout if self.generator in ("", "hf") else (self.generator, self.layout.backend)
        return {(self.algorithm, where), (self.algorithm, self.lora), (where, self.lora)}


def cells(registry: Registry, algorithms: Iterable[str] = (), generators: Iterable[str] = ()) -> Iterator[Cell]:
    """Yield all cells of algorithms and generators, of all if none are given."""
    generators = sorted(generators or registry.offers("generators"))
    for algorithm in sorted(algorithms or registry.offers("algorithms")):
        online = "rollouts" in facts_of(Combination(algorithm), registry).inputs
        for layout in LAYOUTS:
            for lora in (False, True):
                yield from (Cell(algorithm, layout, lora, one) for one in (generators if online else [""]))


@functools.cache
def always(registry: Registry) -> frozenset[Cell]:
    """Return the cells that do not wait for the session `support`: of those on up to two ranks a few with all pairs."""
    small = [cell for cell in cells(registry) if cell.layout.ranks <= 2 and not refusals(cell, registry)]
    kinds = [[cell for cell in small if cell.needs == needs] for needs in {cell.needs for cell in small}]
    return frozenset(cell for kind in kinds for cell in covering(kind))


def sections(cell: Cell, registry: Registry) -> dict[str, Any]:
    """Return the sections of a config that runs a cell, with the roles that the algorithm asks for."""
    layout = cell.layout
    head = {"head": "value"} if cell.algorithm == "rm" else {"reference": True}
    own = {"use": layout.backend, "parallel": dict(layout.sizes)}
    backend = {**own, **head, **({"lora": {**LORA, "experts": layout.experts}} if cell.lora else {})}
    roles = asked_roles(facts_of(Combination(cell.algorithm), registry), own)
    group, generator = ["backend", *roles], {"use": cell.generator} if cell.generator else None
    if cell.generator in ENGINES:
        generator = {"use": cell.generator, "cache_gib": 0.125}
    if cell.in_place:
        group.append("generator")
        generator = {"use": "megatron", "parallel": dict(layout.sizes), "cache_gib": 0.01}
    elif cell.generator == "megatron":
        generator = {"use": "megatron", "weights": "own", "cache_gib": 0.01}
    found = {
        "model": {"path": "model"},
        "backend": backend,
        "cluster": {
            "ranks": dict.fromkeys(group, layout.ranks), "threads": dict.fromkeys(group, 1), "colocate": [group],
        },
        **({"roles": roles} if roles else {}),
    }  # fmt: skip
    return {**found, "generator": generator}


@functools.cache
def refusals(cell: Cell, registry: Registry) -> tuple[str, ...]:
    """Return why the plan refuses a cell. Empty: it does not."""
    base = {
        **sections(cell, registry), "run": {"folder": "run", "steps": 2}, "rollout": {"max_tokens": 4},
        "environments": [{"use": "arithmetic"}], "data": {"train": [{"path": "data.jsonl"}]},
    }  # fmt: skip
    model = ModelInfo("model", dict(MIXED if cell.layout.experts else DENSE))
    return tuple(reasons(Combination(cell.algorithm), base, registry, model))


@frozen
class Collected:
    """A test that runs a cell."""

    test: str
    """Its file and function."""
    parameters: str
    always: bool
    """Whether a session runs it beside `support`."""


@functools.cache
def collected() -> Mapping[str, Collected]:
    """Return the test of each cell, by the name of the cell, as pytest collects them in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pytest cannot collect {', '.join(TESTS)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {cell: Collected(*row) for cell, row in json.loads(done.stdout.splitlines()[-1]).items()}


def collect() -> int:
    """Print the test of each cell as JSON. A test that runs always is preferred."""
    import pytest

    found: dict[str, tuple[str, str, bool]] = {}

    class Plugin:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            for item in session.items:
                for mark in item.iter_markers("supports"):
                    test, _, parameters = item.nodeid.partition("[")
                    row = (test, parameters.removesuffix("]"), mark.kwargs.get("always", True))
                    if mark.args[0] not in found or row[2]:
                        found[mark.args[0]] = row

    code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *TESTS], plugins=[Plugin()])
    print("\n" + json.dumps(found))
    return int(code)


def page(registry: Registry, algorithms: Iterable[str], generators: Iterable[str]) -> str:
    """Write the page for some algorithms and generators."""
    known = {(c.layout, c.lora, c.algorithm, c.generator): c for c in cells(registry, algorithms, generators)}
    columns = sorted({(c.generator != "", c.algorithm, c.generator) for c in known.values()})
    notes: list[str] = []
    tests: list[str] = []
    head = " | ".join(f"`{algorithm}`{f' `{one}`' if one else ''}" for _, algorithm, one in columns)
    lines = [f"| backend | ranks share | | {head} |", f"| --- | --- | --- |{' --- |' * len(columns)}"]
    counts = Counter[str]()
    for layout in LAYOUTS:
        for lora in (False, True):
            found = [mark(known[layout, lora, one, of], registry, notes, tests) for _, one, of in columns]
            counts.update("refused" if m[0].isdigit() else NO_TEST if NO_TEST in m else "test" for m in found)
            row = (f"`{layout.backend}`", layout.name, "LoRA" if lora else "full", *found)
            lines.append(f"| {' | '.join(row)} |")
    below = [f"- {letter(at)}: {test}" for at, test in enumerate(tests)]
    numbered = [f"{at}. {note}" for at, note in enumerate(notes, 1)]
    numbers = f"Of {counts.total()} cells tests run {counts['test']}, the plan refuses {counts['refused']}, and "
    numbers += f"{counts[NO_TEST]} fit the plan and have no test."
    return "\n\n".join([HEAD, numbers, "\n".join(lines), "\n".join(below), *(["\n".join(numbered)] if notes else [])])


def mark(cell: Cell, registry: Registry, notes: list[str], tests: list[str]) -> str:
    """Return the text of a cell. Tests and reasons that it names are added to the lists."""
    if problems := refusals(cell, registry):
        notes += [one for one in problems if one not in notes]
        return ", ".join(str(notes.index(one) + 1) for one in problems)
    if (found := collected().get(cell.name)) is None:
        return f"*{NO_TEST}*"
    often, every = cell.sessions
    test = (
        f"`{found.test}[{'CELL' if found.parameters == cell.name else found.parameters}]`, in `{often}` and `{every}`"
    )
    if test not in tests:
        tests.append(test)
    name = letter(tests.index(test))
    return name if found.always else f"({name})"


def letter(number: int) -> str:
    """Return a letter for a number from 0."""
    return chr(ord("a") + number)


if __name__ == "__main__":
    sys.exit(collect())
