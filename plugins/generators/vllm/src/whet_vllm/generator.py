"""The generator on the driver: spreads requests over the workers that each hold an engine."""

from typing import TYPE_CHECKING

from whet.generation.replicas import ReplicatedGenerator
from whet_vllm.arguments import engine_arguments
from whet_vllm.config import VllmConfig

if TYPE_CHECKING:
    from whet.interfaces.workers import Site


class VllmGenerator(ReplicatedGenerator):
    """One engine for each rank of the slice; see `whet.interfaces.generator.Generator`.

    Logprobs are of `log_softmax(logits / temperature)`; where top-p or top-k restrict what is drawn, of what is left.
    A completion ends at the engine's longest sequence even if it may be longer. When weights come all of
    the engine's cache is forgotten.
    """

    def __init__(self, config: VllmConfig, site: "Site") -> None:
        arguments = {
            "arguments": {device: engine_arguments(config, site, device) for device in ("cpu", "cuda")},
            "engine": config.engine,
            "scratch": str(site.scratch.absolute()),
        }
        super().__init__("whet_vllm.worker:Worker", arguments, site)
