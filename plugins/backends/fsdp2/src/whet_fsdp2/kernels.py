"""Kernels of other packages in place of a model's own modules. They are compared with the modules when a model loads.

`liger`: RMS norms, rotations and SwiGLU of liger-kernel (Hsu et al. 2024, arXiv:2410.10989). It is given no part of the
head: its cross-entropy computes no logprobs of single tokens at a temperature, no entropy, and no likeliest tokens.
"""

from collections.abc import Callable
from typing import Any

from whet.errors import ConfigError

_PARTS = {
    "rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "layer_norm": True, "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}  # fmt: skip


def refuse_unfit(names: tuple[str, ...], device: str, tensor: int) -> None:
    """Raise `ConfigError` if kernels cannot run where a model is."""
    if names and device != "cuda":
        raise ConfigError(
            f"backend.kernels: {', '.join(names)} runs on GPUs, and this rank is on a {device}; leave it out"
        )
    if names and tensor > 1:
        words = f"{', '.join(names)} computes whole weights, and parallel.tensor is {tensor}; leave one out"
        raise ConfigError(f"backend.kernels: {words}")


def use_kernels(model: Any, names: tuple[str, ...], difference: Callable[[], float], tolerance: float) -> None:
    """Replace modules of a model, and look at the `difference` that it makes to the outputs.

    Raises `ConfigError` if a package is missing, does not know the model, or computes something else.
    """
    if not names:
        return
    kind = type(model).__name__
    try:
        from liger_kernel.transformers import monkey_patch
    except Exception as error:  # it imports triton, which may be missing or broken
        words = f"liger needs the package liger-kernel in the trainer's Python: {error}"
        raise ConfigError(f"backend.kernels: {words}; pip install liger-kernel, or leave it out") from error
    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"backend.kernels: liger-kernel has no kernels for {kind}; leave it out")
    try:
        monkey_patch._apply_liger_kernel_to_instance(model, **_PARTS)
        off = difference()
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:  # raised by the package
        raise ConfigError(f"backend.kernels: liger does not work for {kind}: {error}; leave it out") from error
    if not off <= tolerance:
        raise ConfigError(f"backend.kernels: with liger outputs of {kind} differ by {off:.2g}; leave it out")
