"""Support for engines that no plugin installs: whether one is installed, which arguments a config may set, and facts.

Nothing of an engine is imported here. Its arguments are read from its source.
"""

import ast
import functools
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from whet.component import GeneratorFacts, MemoryTerm, Package, Problem
from whet.config.messages import nearest, path_segment
from whet.data.model_info import ModelInfo
from whet.errors import WhetError
from whet.plan.placement import gpus_of
from whet_generation.routed_experts import routed_experts

if TYPE_CHECKING:
    from whet.config.sections import Config

CPU_CACHE_GIB = 1.0
"""Keys and values on a CPU if the config sets nothing: by default engines would take a share of all memory."""


class EngineConfig(Protocol):
    """The keys that the section of a generator on an external engine has."""

    @property
    def dtype(self) -> str:
        """Return the dtype of weights and forward pass; `model`: the model's own."""

    @property
    def cache_gib(self) -> float | None:
        """Return the memory for keys and values on each rank, in GiB."""

    @property
    def memory_fraction(self) -> float:
        """Return the share of a GPU's memory for weights and cache, used if `cache_gib` is not set."""

    @property
    def tensor_parallel(self) -> int:
        """Return the number of processes over which one engine spreads the model."""

    @property
    def engine(self) -> dict[str, Any]:
        """Return any other arguments, by the engine's own names."""


@frozen
class ForeignEngine:
    """An engine, and what a generator's key `engine` may hold: any of its arguments except those that are set
    elsewhere.
    """

    package: Package
    arguments_in: tuple[str, ...]
    """Files with the classes whose fields are the engine's arguments: path patterns within the package."""
    listed_by: str
    """The command that lists the engine's arguments."""
    ours: Mapping[str, str]
    """Arguments that are set elsewhere in the config, and the key that sets them."""
    fixed: Mapping[str, str]
    """Arguments that nobody may change, and why."""
    argument_classes: tuple[str, ...] = ()
    """Classes to read; empty: all classes."""

    @property
    def is_here(self) -> bool:
        """Return whether this interpreter can import the engine."""
        return self.package.is_here

    def known(self) -> frozenset[str]:
        """Return the names of the engine's arguments. Empty: it is not installed."""
        return _fields(self.package.module, self.arguments_in, self.argument_classes)

    def wrong(self, written: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (name, what is wrong) for arguments that cannot be passed on. known: the engine's own; empty:
        unknown.
        """
        for name in written:
            if name in self.ours:
                yield name, f"is set by `{self.ours[name]}`; write it there"
            elif name in self.fixed:
                yield name, f"cannot be changed: {self.fixed[name]}"
            elif known and name not in known:
                meant = nearest(name, set(known) - set(self.ours) - set(self.fixed))
                hint = f"did you mean {meant!r}?" if meant else f"{self.listed_by} lists them"
                yield name, f"is no argument of the installed {self.package.name} ({hint})"

    def problems(self, config: "Config", section: type[EngineConfig]) -> list[Problem]:
        """Return what is wrong with a config's generator. `section` is the config class of generators on this engine.

        The engine of another Python environment may have other arguments; there its workers check them.
        """
        chosen = config.generator.config if config.generator is not None else None
        if not isinstance(chosen, section):
            return []
        return list(self._problems(config, chosen))

    def _problems(self, config: "Config", chosen: EngineConfig) -> Iterator[Problem]:
        known = frozenset() if "generator" in config.cluster.python else self.known()
        for name, message in self.wrong(chosen.engine, known):
            yield Problem(f"generator.engine.{path_segment(name)}", message)

    def refuse(self, written: Mapping[str, Any]) -> None:
        """Raise `WhetError` in a worker's process if the engine is missing, or lacks an argument that is set."""
        if not self.is_here:
            raise WhetError(f"{sys.executable} has no {self.package.name}; {self.package.install}")
        if wrong := list(self.wrong(written, self.known())):
            raise WhetError("\n".join(f"generator.engine.{name} {message}" for name, message in wrong))

    def facts(self, config: EngineConfig, model: ModelInfo, imports: tuple[str, ...]) -> GeneratorFacts:
        """Return the facts of a generator that sends complete weights to the engine, and does so between two tokens."""
        return GeneratorFacts(
            transports=("cuda-ipc", "broadcast", "shared-memory", "disk"),
            on_weight_update=("drain", "continue", "abort"),
            dtype=str(config.engine.get("quantization") or model.dtype_for(config.dtype)),
            processes=config.tensor_parallel,
            problems=functools.partial(split_problems, config, model),
            memory=functools.partial(engine_memory, config, model) if model.parameters else None,
            imports=imports,
            sleeps=("cuda",),
            packages=(self.package,),
            columns_given=routed_experts(model),
        )


def has_tokenizer(folder: str | Path) -> bool:
    """Return whether a model folder holds the tokenizer files that an engine needs to find stop strings."""
    return any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def visible_gpus(device: str) -> dict[str, str]:
    """Return `CUDA_VISIBLE_DEVICES` for the processes of an engine that has a device of this process.

    `device` counts the GPUs that this process sees, e.g. `cuda:0,1`. Empty for a CPU. An engine numbers its processes
    from its first visible GPU on.
    """
    if device == "cpu":
        return {}
    visible, gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ""), gpus_of(device)
    names = visible.split(",") if visible else [str(gpu) for gpu in range(max(gpus) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus)}


def engine_memory(config: EngineConfig, model: ModelInfo, ranks: int, trained: bool) -> Iterator[MemoryTerm]:
    """Yield what one engine holds over all its processes: weights, and keys and values as the config limits them."""
    smaller = "spread a model over more GPUs (generator.tensor_parallel), or compute in bfloat16"
    weights, words = model.weight_bytes(config.dtype), f"weights in {model.dtype_for(config.dtype)}"
    yield MemoryTerm(words, weights, woken="adapter", change=smaller)
    cache = int((config.cache_gib or CPU_CACHE_GIB) * 2**30)
    share, key = (0.0, "cache_gib") if config.cache_gib else (config.memory_fraction, "memory_fraction")
    change = f"lower generator.{key}"
    yield MemoryTerm("keys and values", cache, kept_asleep=False, gpu_share=share, change=change)


def split_problems(config: EngineConfig, model: ModelInfo, ranks: int) -> Iterator[Problem]:
    """Yield what keeps the processes of an engine from sharing a model. Paths are within the generator's section.

    Each process has equally many attention heads, and at least one key/value head, which others may have too.
    """
    heads, kv_heads = model.heads, model.kv_heads
    able = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if heads and config.tensor_parallel not in able:
        words = f"is {config.tensor_parallel}, and the model has {heads} attention heads and {kv_heads} key/value heads"
        wanted = "wanted a divisor of the former that divides the latter or is a multiple of it"
        yield Problem("tensor_parallel", f"{words}; {wanted}: {', '.join(map(str, able))}")


@functools.cache
def _fields(module: str, patterns: tuple[str, ...], classes: tuple[str, ...]) -> frozenset[str]:
    """Return the names of annotated fields from a package's source."""
    spec = importlib.util.find_spec(module)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    files = [file for folder in folders for pattern in patterns for file in Path(folder).glob(pattern)]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return frozenset(name for tree in trees for name in _fields_of(tree, classes))


def _fields_of(tree: ast.Module, classes: tuple[str, ...]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (not classes or node.name in classes):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id
