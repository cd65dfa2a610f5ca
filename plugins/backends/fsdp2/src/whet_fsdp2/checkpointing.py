"""Activation checkpointing: what the forward pass of a layer keeps for the backward pass.

                 kept of a layer                                 computed again in the backward pass
    false        all that the backward pass needs                nothing
    selective    its input, results of matrix products and       norms, activations, rotations, products with
                 of attention                                    something small: cheap, and as large as the rest
    true         its input                                       all of it

A result of a product of [T, K] with [K, N] holds T N numbers that take 2 T K N operations, so what is saved for each
number that is kept grows with K.
"""

from functools import partial
from typing import Any, Literal

from whet.errors import ConfigError

Checkpointing = bool | Literal["selective"]
CHEAP = 16
"""A product whose inner dimension is less than this part of its width is computed again, e.g. the B of an adapter."""
PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default"})
"""Operations whose last two arguments are matrices."""
# No batched products: attention by plain products makes scores of a square size with them, and changes them in place.
KEPT = PRODUCTS | {
    "aten._grouped_mm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
    "flash_attn._flash_attn_varlen_forward.default",
}


def enable_checkpointing(model: Any, kind: Checkpointing) -> None:
    """Turn checkpointing on. There is no dropout, so no random state has to be kept.

    Layers check that they are in training mode. The modules in them are not: there a router may choose at random.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        options["context_fn"] = partial(create_selective_checkpoint_contexts, keeps)
    try:
        enable(options)
    except ValueError as error:
        raise ConfigError(f"backend.gradient_checkpointing: {error}") from error
    for module in model.modules():
        module.training = bool(getattr(module, "gradient_checkpointing", False))


def keeps(context: Any, operation: Any, *arguments: Any, **more: Any) -> Any:
    """Return whether selective checkpointing keeps the result of an operation, as torch's `CheckpointPolicy`."""
    from torch.utils.checkpoint import CheckpointPolicy

    name = str(operation)  # an operation of a package may be registered after this module is imported
    kept = name in KEPT
    if name in PRODUCTS:
        left, right = arguments[-2:]
        kept = left.shape[-1] * CHEAP >= right.shape[-1]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
