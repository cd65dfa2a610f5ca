"""Which modules the layers are made of: Transformer Engine on a GPU, plain PyTorch modules in tests on a CPU."""

from typing import Any, Literal

import torch

from whet.errors import ConfigError
from whet_megatron.grouped_experts import plain_experts

Layers = Literal["transformer-engine", "test"]
INSTALL = "install it for the CUDA of this machine with `pip install 'whet-megatron[te]'`"


def choose(wanted: str, device: torch.device) -> Layers:
    """Return the modules for a device. Raises `ConfigError` if Transformer Engine is needed and cannot be used.

    An installed engine that cannot load makes the import of Megatron fail as well, so this comes before it.
    """
    if wanted == "test" or (wanted == "auto" and device.type == "cpu"):
        refuse_broken()
        return "test"
    if device.type == "cpu":
        raise ConfigError("backend.layers: is transformer-engine, which needs a GPU; set it to auto or test")
    try:
        import transformer_engine.pytorch  # noqa: F401  # whether it loads is the question
    except ImportError as error:
        words = f"backend.layers: Transformer Engine cannot be imported ({error}); {INSTALL}"
        raise ConfigError(words) from error
    except Exception as error:  # without CUDA libraries it raises what it likes
        words = f"backend.layers: Transformer Engine is installed and cannot load: {error}; {INSTALL}"
        raise ConfigError(words) from error
    return "transformer-engine"


def grouped(wanted: bool | str, chosen: Layers) -> bool:
    """Return whether experts are grouped: with `auto` where Transformer Engine has a kernel for it."""
    return chosen == "transformer-engine" if wanted == "auto" else bool(wanted)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU. None: the device is a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def refuse_broken() -> None:
    """Raise `ConfigError` if an installed Transformer Engine would make the import of Megatron fail."""
    try:
        import transformer_engine  # noqa: F401  # whether it loads is the question
    except ImportError:
        return
    except Exception as error:  # without CUDA libraries it raises what it likes
        raise ConfigError(
            f"backend: Transformer Engine is installed and cannot load, so that Megatron cannot be imported: {error}; "
            "uninstall it on this machine (`pip uninstall transformer-engine transformer-engine-cu12 "
            f"transformer-engine-cu13 transformer-engine-torch`), or {INSTALL}"
        ) from error


def specification(chosen: Layers, config: Any, vp_stage: int | None) -> Any:
    """Return Megatron's specification of the layers of one stage."""
    if chosen == "test":
        from whet_megatron.plain_layers import plain_spec

        found = plain_spec(config, vp_stage)
        if config.num_moe_experts is not None and config.moe_grouped_gemm:
            for layer in found.layer_specs:
                layer.submodules.mlp.submodules.experts = plain_experts()
    else:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        found = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if config.num_moe_experts is not None:
        from whet_megatron.router import WatchedRouter

        for layer in found.layer_specs:
            layer.submodules.mlp.submodules.router = WatchedRouter
    return found
