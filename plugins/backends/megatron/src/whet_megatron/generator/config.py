"""The section `generator:` with `use: megatron`, and its facts for planning. Imports no torch and no Megatron."""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import attrs
from attrs import field, frozen

from whet.component import GeneratorFacts, MemoryTerm, Problem
from whet.config.bounds import GIB, PROCESSES, RETRIES, TOKENS, above, between
from whet.config.sections import Config
from whet.data.model_info import DTYPE_BYTES, ModelInfo
from whet.interfaces.weights import IN_PLACE
from whet_megatron import memory, parallel
from whet_megatron.architecture import read, refusals
from whet_megatron.config import FORM, MegatronConfig
from whet_megatron.parallel import ParallelConfig

VOCABULARY_MULTIPLE = 64
"""The rows of the vocabulary on each rank are padded to a multiple of it, where the generator holds its own weights."""


_SIZE = between(1, PROCESSES)


@frozen
class SplitConfig:
    """Numbers of ranks that share the model in generation. The ranks that are left are replicas."""

    tensor: int = field(default=1, validator=_SIZE)
    """Ranks that split each matrix and the attention heads between them."""
    sequence: bool = False
    """Tensor parallel ranks also share the tokens of norms and residuals."""
    pipeline: int = field(default=1, validator=_SIZE)
    """Ranks that hold different layers. They work one after the other on each token, so it is for models that fit no
    other way."""
    expert: int = field(default=1, validator=_SIZE)
    """Ranks that hold different experts, among those of `tensor`."""
    expert_tensor: int = field(default=1, validator=_SIZE)
    """Tensor parallel ranks of each expert."""

    @property
    def sizes(self) -> ParallelConfig:
        """Return the sizes of all axes, as a backend has them."""
        return ParallelConfig(**attrs.asdict(self))


@frozen
class MegatronGeneratorConfig:
    """Generates with Megatron's inference: a paged cache of keys and values, and requests that join and leave the
    batch while it runs.
    """

    parallel: SplitConfig = attrs.Factory(SplitConfig)
    """How ranks share the model. With shared weights it is that of the backend."""
    weights: Literal["shared", "own"] = "shared"
    """`shared`: those of the backend `megatron` in the same processes, in place, so that a weight sync copies nothing
    and no memory is needed twice. `own`: a copy, to which weight syncs bring new weights; for a generator with
    processes of its own, or beside another backend."""
    max_batch: int = field(default=256, validator=between(1, RETRIES))
    """Most sequences that one replica decodes together."""
    cache_gib: float = field(default=4.0, validator=above(0, GIB))
    """Memory for keys and values on each rank, in GiB. A request begins when the cache has room for its longest
    completion."""
    prefill_tokens: int = field(default=8192, validator=between(1, TOKENS))
    """Prompt tokens after which no further request joins a forward pass. A longer prompt has one of its own."""
    layers: Literal["auto", "transformer-engine", "test"] = "auto"
    """The modules of the layers of own weights, as in `backend.layers`. On a GPU, attention needs flash-attn."""


def facts(config: MegatronGeneratorConfig, model: ModelInfo) -> GeneratorFacts:
    """Return the generator's transports, what does not divide, and the memory of one rank."""
    shared = config.weights == "shared"
    return GeneratorFacts(
        ranks=config.parallel.sizes.least_ranks,
        problems=partial(problems, config, model),
        transports=(IN_PLACE,) if shared else ("shared", "broadcast", "shared-memory", "disk"),
        in_place=FORM if shared else "",
        # Shared weights change in a training step, during which no request runs.
        on_weight_update=("drain",) if shared else ("drain", "continue", "abort"),
        dtype=model.dtype,
        memory=None if any(refusals(model)) else partial(memory_of, config, model),
        imports=("whet_megatron.generator.worker", "whet_megatron.ahead"),
        forkable=True,
        sleeps=("cpu", "cuda"),
        extras=frozenset({"progress", "likeliest"}),
    )


def memory_of(config: MegatronGeneratorConfig, model: ModelInfo, ranks: int, trained: bool) -> Iterator[MemoryTerm]:
    """Yield the memory of one rank: own weights, and keys and values."""
    if config.weights == "own":
        weights = sum(memory.held(config.parallel.sizes, read(model), VOCABULARY_MULTIPLE)) * DTYPE_BYTES[model.dtype]
        change = "raise generator.parallel.tensor, or take generator.weights: shared"
        yield MemoryTerm(f"weights in {model.dtype}", weights, woken="weights", change=change)
    cache = int(config.cache_gib * 2**30)
    yield MemoryTerm("keys and values", cache, kept_asleep=False, change="lower generator.cache_gib")


def problems(config: MegatronGeneratorConfig, model: ModelInfo, ranks: int) -> Iterator[Problem]:
    """Yield what the model or a number of ranks does not allow. Paths are within the generator's section."""
    wrong, sizes = list(refusals(model)), config.parallel.sizes
    for words in wrong:
        yield Problem("use", f"is megatron, and the model {words}; use: hf may do")
    if not wrong:
        yield from parallel.problems(sizes, read(model), VOCABULARY_MULTIPLE, ranks)
    if sizes.expert * sizes.expert_tensor > sizes.tensor:
        words = f"lays experts over more ranks than the {sizes.tensor} of parallel.tensor"
        yield Problem("parallel.expert", f"{words}; a replica of the generator has its experts for itself")


def checked(config: Config) -> Iterator[Problem]:
    """Yield what a generator `megatron` does not allow beside it."""
    generator = config.generator.config if config.generator is not None else None
    if not isinstance(generator, MegatronGeneratorConfig) or generator.weights == "own":
        return
    backend, own = config.backend.config, "or set generator.weights: own"
    if not isinstance(backend, MegatronConfig):
        words = f"is shared, and the backend is {config.backend.name}; take backend.use: megatron, {own}"
        yield Problem("generator.weights", words)
        return
    if backend.parallel != generator.parallel.sizes:
        words = "is not backend.parallel, whose ranks hold the weights; make them equal"
        yield Problem("generator.parallel", f"{words}, {own}")
    if config.rollout.max_staleness:
        words = (
            f"is shared, and with rollout.max_staleness {config.rollout.max_staleness} weights change under requests"
        )
        yield Problem("generator.weights", f"{words}; set rollout.max_staleness: 0, {own}")
