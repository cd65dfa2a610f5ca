"""Layers compiled by `torch.compile`: what lies between matrix products becomes a few kernels.

    norm, projections, rotation   |   attention   |   projection, residual, norm, feed-forward network, residual
    compiled                          as it is        compiled

Every layer but the last is compiled by itself. The layers have the same code, so it is compiled once, and a deep model
takes no longer than a small one. Sizes are symbols: rows of other lengths need no other code. Attention of packed rows
has kernels of its own. The last layer is computed only at the positions that are read, and stays as it is.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.errors import ConfigError
from whet_fsdp2 import attention
from whet_fsdp2.norms import Hastened

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
CHECKPOINTING = "transformers.modeling_layers"
"""The module that wraps the forward passes of layers by functions that checkpoint them."""
VARIANTS = 64
"""Most variants of the code of a layer: with and without gradient, by layout, dtype and class of the model."""


def compile_layers(model: Any, difference: Callable[[], float], tolerance: float) -> None:
    """Compile the layers of a model, and look at the `difference` that it makes to the outputs.

    Code of layers is compiled when they are first called, by `difference` with a gradient if the model is trained.
    Raises `ConfigError` if the model cannot be compiled, or if the compiled layers compute something else.
    """
    kind, layers = type(model).__name__, getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) < 2:
        raise ConfigError(f"backend.compile: {kind} has no list of two layers or more; leave it out")
    keep_code_with_the_user()
    print("compiling the layers of the model: up to a minute, and some seconds in later runs", flush=True)
    began = time.monotonic()
    try:
        import torch._dynamo

        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
        attention.register_apart()
        for layer in layers[:-1]:
            for module in layer.modules():
                if isinstance(vars(module).get("forward"), Hastened):  # the model's own operations can be fused
                    del module.forward
            layer.forward = _compiled(layer)
        trained = any(parameter.requires_grad for parameter in model.parameters())
        with torch.set_grad_enabled(trained):
            off = difference()
    except Exception as error:  # the compiler has many exceptions of its own
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        words = f"torch.compile does not work for {kind} here: {told}"
        needs = "it needs a C++ compiler such as g++ on a CPU, and Triton on a GPU"
        raise ConfigError(f"backend.compile: {words} ({needs}); leave it out") from error
    if not off <= tolerance:
        raise ConfigError(f"backend.compile: compiled, outputs of {kind} differ by {off:.2g}; leave it out")
    print(f"compiled {len(layers) - 1} layers in {time.monotonic() - began:.1f} s", flush=True)


def _compiled(layer: Any) -> Callable[..., Any]:
    """Return the compiled forward pass of a layer. Checkpointing stays around it: it cannot be compiled."""
    plain, outside = type(layer).forward, True
    while plain.__globals__["__name__"] == CHECKPOINTING:
        plain, outside = plain.__wrapped__, False  # older versions of transformers checkpoint around the module's call
    run: Callable[..., Any] = torch.compile(plain.__get__(layer), dynamic=True)
    if outside:
        return run

    def forward(*args: Any, **kwargs: Any) -> Any:
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(partial(run, **kwargs), *args)
        return run(*args, **kwargs)

    return forward


def keep_code_with_the_user() -> None:
    """Set the folder that keeps compiled code between runs, unless the environment names one.

    By default it has a name in /tmp that another user could have taken, and torch runs what it finds there. Without a
    home folder the folder is a new one.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(CACHE_DIR) in (None, default_cache_dir()):  # torch sets it to the default when it is imported
        root = os.environ.get("XDG_CACHE_HOME", "")
        cache = root if os.path.isabs(root) else os.path.expanduser("~/.cache")
        homeless = cache.startswith("~")
        kept = tempfile.mkdtemp(prefix="whet-compiled-") if homeless else str(Path(cache, "whet", "compiled"))
        os.environ[CACHE_DIR] = kept
