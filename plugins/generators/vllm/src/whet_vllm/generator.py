"""The generator on the driver: spreads requests over the workers that each hold an engine."""

from typing import TYPE_CHECKING

from whet.rollout.replicas import Replicas
from whet_vllm.arguments import engine_arguments
from whet_vllm.config import VllmConfig

if TYPE_CHECKING:
    from whet.cluster.slices import Pending, Site
    from whet.data.records import Completion, Request
    from whet.interfaces.generator import Running
    from whet.refit.link import Link


class VllmGenerator:
    """One engine for each rank of the slice; see `whet.interfaces.generator.Generator`.

    Logprobs are of `log_softmax(logits / temperature)`; where top-p or top-k restrict what is drawn, of what is left.
    A completion ends at the engine's longest sequence even if it may be longer.
    """

    def __init__(self, config: VllmConfig, site: "Site") -> None:
        arguments = {
            "arguments": {device: engine_arguments(config, site, device) for device in ("cpu", "cuda")},
            "engine": config.engine,
            "scratch": str(site.scratch.absolute()),
        }
        self._replicas = Replicas(site.slice.spawn("whet_vllm.worker:Worker", arguments), site)

    async def generate(self, request: "Request") -> "Completion":
        """Continue one sequence. Raises `WhetError` for a prompt that leaves no room."""
        return await self._replicas.generate(request)

    def receive_weights(self, link: "Link", version: int, running: "Running" = "drain") -> "Pending":
        """Start to take new weights over a link.

        Requests that come from now on wait for them. `drain` lets those that run end with the old ones; `keep` stops
        them between two tokens, and computes what they have again with the new ones; `abort` ends them with what they
        have and `stop="abort"`. All of the engine's cache is forgotten.
        """
        return self._replicas.receive_weights(link, version, running)

    def sleep(self) -> None:
        """Give a GPU's memory back, weights and cache. On a CPU the engine cannot, and nothing happens."""
        self._replicas.workers.call("sleep", phase="sleep")

    def wake(self) -> None:
        """Take it again."""
        self._replicas.workers.call("wake", phase="wake")

    def close(self) -> None:
        """End the engines and their workers."""
        self._replicas.close()
