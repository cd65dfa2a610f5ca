"""The backend on the driver."""

from whet.interfaces.workers import RoleContext
from whet_megatron.config import MegatronConfig
from whet_training.handle import ShardedBackend


class MegatronBackend(ShardedBackend):
    """A model of Megatron Core on a group of ranks. Implements `whet.interfaces.backend.Backend`."""

    def __init__(self, config: MegatronConfig, context: RoleContext) -> None:
        super().__init__("whet_megatron.worker:Worker", config, context, config.layout)
