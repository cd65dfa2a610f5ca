"""The generator on the driver: spreads requests over the workers that hold the model."""

from typing import TYPE_CHECKING

from whet.generation.replicas import ReplicatedGenerator
from whet_hf.config import HfConfig

if TYPE_CHECKING:
    from whet.interfaces.workers import Site


class HfGenerator(ReplicatedGenerator):
    """One replica of the model for each rank of the slice; see `whet.interfaces.generator.Generator`.

    Logprobs are of `log_softmax(logits / temperature)` of the whole vocabulary, also where top-p or top-k restrict
    what is drawn. A completion ends at the model's last position even if it may be longer. With `continue`, requests
    that run when weights come go on with the keys and values that the old ones made. While it
    sleeps its weights wait in the host's memory, or in a file where it runs on a CPU, and it has no cache.
    """

    def __init__(self, config: HfConfig, site: "Site") -> None:
        arguments = {
            "path": site.model.path,
            "dtype": site.model.dtype_for(config.dtype),
            "trust_remote_code": site.model.trust_remote_code,
            "max_batch": config.max_batch,
            "cache_bytes": int(config.cache_gib * 2**30),
            "fused": config.decoder == "auto",
            "scratch": str(site.scratch.absolute()),
        }
        super().__init__("whet_hf.worker:Worker", arguments, site)
