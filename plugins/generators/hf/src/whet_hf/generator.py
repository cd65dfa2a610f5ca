"""The generator on the driver: spreads requests over the workers that hold the model."""

from typing import TYPE_CHECKING

from whet.rollout.replicas import Replicas
from whet_hf.config import HfConfig

if TYPE_CHECKING:
    from whet.cluster.slices import Pending, Site
    from whet.data.records import Completion, Request
    from whet.interfaces.generator import Running
    from whet.refit.link import Link


class HfGenerator:
    """One replica of the model for each rank of the slice; see `whet.interfaces.generator.Generator`.

    Logprobs are of `log_softmax(logits / temperature)` of the whole vocabulary, also where top-p or top-k restrict
    what is drawn. A completion ends at the model's last position even if it may be longer.
    """

    def __init__(self, config: HfConfig, site: "Site") -> None:
        workers = site.slice.spawn(
            "whet_hf.worker:Worker",
            {
                "path": site.model.path,
                "dtype": site.model.dtype if config.dtype == "model" else config.dtype,
                "trust_remote_code": site.model.trust_remote_code,
                "max_batch": config.max_batch,
                "cache_bytes": int(config.cache_gib * 2**30),
                "fused": config.decoder == "auto",
            },
        )
        self._replicas = Replicas(workers, site)

    async def generate(self, request: "Request") -> "Completion":
        """Continue one sequence. Raises `WhetError` for a prompt that leaves no room."""
        return await self._replicas.generate(request)

    def receive_weights(self, link: "Link", version: int, running: "Running" = "drain") -> "Pending":
        """Start to take new weights over a link: once the batches that run have ended, or between two of their tokens.

        `drain` lets them end, so that each completion is of one version. With `keep` they go on with the new weights
        and the keys and values that the old ones made. `abort` ends them at once: their requests come back with what
        they have and `stop="abort"`. Requests that wait get the new weights.
        """
        return self._replicas.receive_weights(link, version, running)

    def sleep(self) -> None:
        """Free the cache, and on a GPU the weights too."""
        self._replicas.workers.call("sleep", phase="sleep")

    def wake(self) -> None:
        """Bring the weights back."""
        self._replicas.workers.call("wake", phase="wake")

    def close(self) -> None:
        """End the workers."""
        self._replicas.close()
