"""The backend on the driver."""

from pathlib import Path

from whet.interfaces.workers import RoleContext
from whet_megatron.config import MegatronConfig
from whet_training.handle import ShardedBackend
from whet_training.saving import BackgroundSave


class MegatronBackend(ShardedBackend):
    """A model of Megatron Core on a group of ranks. Implements `whet.interfaces.backend.Backend`."""

    def __init__(self, config: MegatronConfig, context: RoleContext) -> None:
        super().__init__("whet_megatron.worker:Worker", config, context, config.layout)

    def save_in_background(self, folder: Path) -> BackgroundSave:
        """Start to copy weights, optimizer and schedule, and to write the copy."""
        return BackgroundSave(self._awake, folder)
