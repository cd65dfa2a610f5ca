"""The generator on the driver: distributes requests over the workers that hold the model."""

from typing import TYPE_CHECKING

from whet.interfaces.weights import IN_PLACE
from whet_generation.replicas import ReplicatedGenerator
from whet_hf.config import HfConfig

if TYPE_CHECKING:
    from whet.interfaces.workers import RoleContext


class HfGenerator(ReplicatedGenerator):
    """One replica of the model on each rank; see `whet.interfaces.generator.Generator`.

    Logprobs are of `log_softmax(logits / temperature)` over the whole vocabulary, even if top-p or top-k restricts the
    sampling. A completion ends at the model's last position, even if `max_tokens` is larger. With `continue`, requests
    that run during a weight sync keep the keys and values of the old weights for earlier tokens. While the generator
    sleeps, its own weights are in host memory, or in a file on a CPU, and it has no cache. Where no weights are synced,
    as in an evaluation without training, it loads weights of its own, even if the config says `shared`.
    """

    def __init__(self, config: HfConfig, context: "RoleContext") -> None:
        arguments = {
            "path": context.model.path,
            "dtype": context.model.dtype_for(config.dtype),
            "trust_remote_code": context.model.trust_remote_code,
            "max_batch": config.max_batch,
            "cache_bytes": int(config.cache_gib * 2**30),
            "fused": config.decoder == "auto",
            "prefix_caching": config.prefix_caching,
            "scratch": str(context.scratch.absolute()),
            "columns": sorted(context.columns),
            "shared": config.weights == "shared" and context.transport == IN_PLACE,
        }
        super().__init__("whet_hf.worker:Worker", arguments, context)
