"""The section `backend.fp8`: matrix products of layers in 8 bits, by Transformer Engine. Imports no torch.

Weights stay in bfloat16 and are quantised in each pass, so loads, weight syncs, exports and checkpoints are those of a
run without FP8. Embedding, head, norms, routers and attention itself compute in bfloat16.
"""

from collections.abc import Iterator
from typing import Any, Literal

import attrs
from attrs import field, frozen

from whet.component import Package, Problem
from whet.config.bounds import between
from whet.errors import ConfigError
from whet_megatron.architecture import Architecture
from whet_megatron.parallel import ParallelConfig

Recipe = Literal["blockwise", "tensorwise", "delayed", "mxfp8"]
CAPABILITY: dict[str, tuple[int, int]] = {
    "blockwise": (9, 0), "tensorwise": (8, 9), "delayed": (8, 9), "mxfp8": (10, 0)
}  # fmt: skip
"""The least compute capability of a GPU. 8.9: Ada. 9.0: Hopper. 10.0: Blackwell."""
ENGINE = Package(
    "Transformer Engine",
    "transformer_engine",
    ("transformer-engine", "transformer_engine"),
    install="pip install 'whet-megatron[te]' on a machine with the CUDA libraries",
)


@frozen
class DelayedConfig:
    """Options of the recipe `delayed`."""

    history: int = field(default=1024, validator=between(1, 65_536))
    """Passes whose largest values are remembered (`fp8_amax_history_len`)."""
    amax: Literal["max", "most_recent"] = "max"
    """Which of these values scales the next pass (`fp8_amax_compute_algo`)."""
    weight_gradients: bool = True
    """Compute the gradients of weights in FP8, too (`fp8_wgrad`)."""


@frozen
class Fp8Config:
    """Matrix products of layers in 8-bit floating point, on GPUs."""

    recipe: Recipe = "blockwise"
    """How values are scaled to 8 bits. `blockwise`: each block of 128 values, of a weight 128 x 128, by its largest
    (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2); Hopper, CUDA 12.9. `tensorwise`: each tensor by its largest
    value; Ada or later. `delayed`: each tensor by the largest value of earlier passes (Micikevicius et al. 2022,
    arXiv:2209.05433); Ada or later. `mxfp8`: each 32 values by a power of two (Rouhani et al. 2023, arXiv:2310.10537);
    Blackwell."""
    format: Literal["auto", "e4m3", "hybrid"] = "auto"
    """`e4m3`: 4 bits of exponent and 3 of mantissa. `hybrid`: gradients of outputs have 5 and 2. `auto`: e4m3 for
    `blockwise` and `mxfp8`, hybrid for the others."""
    first_bf16: int = field(default=0, validator=between(0, 10_000))
    """Layers at the start that stay in bfloat16. Not with `delayed`."""
    last_bf16: int = field(default=0, validator=between(0, 10_000))
    """Layers at the end that stay in bfloat16. Not with `delayed`."""
    delayed: DelayedConfig = attrs.Factory(DelayedConfig)
    """Options of the recipe `delayed`."""

    @property
    def multiple(self) -> int:
        """Return the number that must divide the sides of matrices, and the tokens of a pass on a rank."""
        return 32 if self.recipe == "mxfp8" else 16


def options(config: Fp8Config) -> dict[str, Any]:
    """Return the fields of Megatron's `TransformerConfig`."""
    automatic = "e4m3" if config.recipe in ("blockwise", "mxfp8") else "hybrid"
    return {
        "fp8": automatic if config.format == "auto" else config.format,
        "fp8_recipe": config.recipe,
        "fp8_param": False,
        "fp8_amax_history_len": config.delayed.history,
        "fp8_amax_compute_algo": config.delayed.amax,
        "fp8_wgrad": config.delayed.weight_gradients,
        "first_last_layers_bf16": bool(config.first_bf16 or config.last_bf16),
        "num_layers_at_start_in_bf16": config.first_bf16,
        "num_layers_at_end_in_bf16": config.last_bf16,
    }


def note(config: Fp8Config) -> str:
    """Return the sentence of the plan."""
    least = ".".join(map(str, CAPABILITY[config.recipe]))
    return f"megatron: matrix products in FP8 ({config.recipe}) need GPUs of compute capability {least} or higher"


def section_problems(config: Fp8Config, layers: str, path: str) -> Iterator[Problem]:
    """Yield what is wrong with a section that stands at `path`, by itself. layers: the setting beside it."""
    if layers == "test":
        yield Problem(path, "is set, and layers is test; only Transformer Engine multiplies in FP8: drop one of them")
    if config.recipe == "delayed":
        for key in ("first_bf16", "last_bf16"):
            if count := getattr(config, key):
                words = f"is {count}, and the recipe is delayed, whose scales need every layer; take another recipe"
                yield Problem(f"{path}.{key}", words)
    elif config.delayed != DelayedConfig():
        yield Problem(f"{path}.delayed", f"is set, and the recipe is {config.recipe}; leave it out")


def problems(config: Fp8Config, sizes: ParallelConfig, model: Architecture, dtype: str) -> Iterator[Problem]:
    """Yield what a model does not allow. Paths are within the backend's section."""
    if dtype != "bfloat16":
        yield Problem("fp8", f"is set, and the model computes in {dtype}; set model.dtype to bfloat16")
    stage = model.layers // sizes.pipeline
    for key in ("first_bf16", "last_bf16"):
        if (count := getattr(config, key)) > stage:
            yield Problem(f"fp8.{key}", f"is {count}, and a pipeline rank holds {stage} of {model.layers} layers")
    if config.first_bf16 + config.last_bf16 >= model.layers:
        yield Problem("fp8", f"is set, and all {model.layers} layers stay in bfloat16 (first_bf16, last_bf16)")
    wrong = [f"{size} {what}" for what, size in _sides(sizes, model).items() if size % config.multiple]
    if wrong:
        words = f"is {config.recipe}, whose matrices have sides that {config.multiple} divides"
        yield Problem("fp8.recipe", f"{words}; a rank has {' and '.join(wrong)}")


def _sides(sizes: ParallelConfig, model: Architecture) -> dict[str, int]:
    """Return the sides of the matrices of a rank."""
    heads = {
        "values of heads": model.heads * model.head_dim // sizes.tensor,
        "queries, keys and values": (model.heads + 2 * model.kv_heads) * model.head_dim // sizes.tensor,
    }
    if model.experts:
        inner = {"values of an expert": model.expert_mlp // sizes.expert_tensor}
    else:
        inner = {"feed-forward values": model.mlp // sizes.tensor}
    return {"hidden values": model.hidden, **heads, **inner}


def refuse_device(config: Fp8Config, capability: tuple[int, int] | None) -> None:
    """Raise `ConfigError` if a device cannot compute the recipe. capability: of the GPU; None: it is a CPU."""
    least = CAPABILITY[config.recipe]
    if capability is not None and capability >= least:
        return
    wanted = f"GPUs of compute capability {least[0]}.{least[1]} or higher"
    if capability is None:
        raise ConfigError(f"backend.fp8: is set, and this rank has a CPU; it needs {wanted}: leave it out")
    able = [name for name, one in CAPABILITY.items() if capability >= one]
    change = f"take {' or '.join(able)}" if able else "leave backend.fp8 out"
    found = f"this rank's GPU has {capability[0]}.{capability[1]}"
    raise ConfigError(f"backend.fp8.recipe: is {config.recipe}, which needs {wanted}, and {found}; {change}")
