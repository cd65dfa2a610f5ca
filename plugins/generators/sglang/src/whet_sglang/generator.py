"""The generator on the driver: spreads requests over the workers that each hold an engine."""

from typing import TYPE_CHECKING

from whet.generation.replicas import ReplicatedGenerator
from whet_sglang.arguments import engine_arguments
from whet_sglang.config import SglangConfig

if TYPE_CHECKING:
    from whet.interfaces.workers import Site


class SglangGenerator(ReplicatedGenerator):
    """One engine for each rank of the slice; see `whet.interfaces.generator.Generator`.

    Logprobs are of `log_softmax(logits / temperature)` of the whole vocabulary, also where top-p or top-k restrict
    what is drawn. A completion ends at the engine's longest sequence even if it may be longer. When weights come all of
    the engine's cache is forgotten.
    """

    def __init__(self, config: SglangConfig, site: "Site") -> None:
        arguments = {
            "arguments": {device: engine_arguments(config, site, device) for device in ("cpu", "cuda")},
            "engine": config.engine,
            "scratch": str(site.scratch.absolute()),
        }
        super().__init__("whet_sglang.worker:Worker", arguments, site)
