"""Imports all of Megatron Core that this backend uses, and keeps it from starting and leaving things.

It takes seconds, so workers do it while other things are prepared, and on CPUs once for all that are forked. If it
cannot be imported, `whet_megatron.layers` says why.
"""

import queue
import sys
from importlib import import_module
from typing import Any

MODULES = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.inference.contexts.dynamic_context",
    "megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper",
)

hidden = "wandb" not in sys.modules
if hidden:  # Megatron imports it where it is installed, and its import makes folders that a killed process leaves
    sys.modules["wandb"] = None  # type: ignore[assignment]  # makes the import raise ImportError
try:
    for module in MODULES:
        import_module(module)
finally:
    if hidden:
        del sys.modules["wandb"]

# Else each rank starts a process to pass on the results of a save, and the saves of this backend need no process.
saving: Any = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
saving._results_queue = queue.Queue()
