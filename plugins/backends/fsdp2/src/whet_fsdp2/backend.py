"""The backend on the driver."""

from pathlib import Path

from whet.interfaces.workers import RoleContext
from whet_fsdp2.config import Fsdp2Config
from whet_training.handle import ShardedBackend
from whet_training.saving import BackgroundSave


class Fsdp2Backend(ShardedBackend):
    """A Hugging Face model on a group of ranks. Implements `whet.interfaces.backend.Backend`."""

    def __init__(self, config: Fsdp2Config, context: RoleContext) -> None:
        layout = "shared" if config.layout == "auto" else config.layout
        super().__init__("whet_fsdp2.worker:Worker", config, context, layout)

    def save_in_background(self, folder: Path) -> BackgroundSave:
        """Start to copy weights, optimizer and schedule, and to write the copy."""
        return BackgroundSave(self._awake, folder)
