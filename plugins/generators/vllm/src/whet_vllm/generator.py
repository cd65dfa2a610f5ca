"""The generator on the driver: distributes requests over workers with one engine each."""

from typing import TYPE_CHECKING

from whet_generation.replicas import ReplicatedGenerator
from whet_vllm.arguments import engine_arguments
from whet_vllm.config import VllmConfig

if TYPE_CHECKING:
    from whet.interfaces.workers import RoleContext


class VllmGenerator(ReplicatedGenerator):
    """One engine for each rank; see `whet.interfaces.generator.Generator`.

    Logprobs are of `log_softmax(logits / temperature)`. If top-p or top-k restricts the sampling, they are over the
    tokens that are left. A completion ends at the engine's longest sequence, even if `max_tokens` is larger. A weight
    sync clears the engine's whole cache.
    """

    def __init__(self, config: VllmConfig, context: "RoleContext") -> None:
        arguments = {
            "arguments": {device: engine_arguments(config, context, device) for device in ("cpu", "cuda")},
            "engine": config.engine,
            "scratch": str(context.scratch.absolute()),
        }
        super().__init__("whet_vllm.worker:Worker", arguments, context)
