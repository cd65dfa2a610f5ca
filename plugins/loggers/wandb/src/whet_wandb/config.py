"""The config of the logger `wandb`."""

from typing import Literal

from attrs import Factory, field, frozen

from whet.config.bounds import SECONDS, between
from whet_tracking.config import TrackingConfig


@frozen
class WandbConfig(TrackingConfig):
    """Sends a run to Weights & Biases, or keeps it in the run folder until `wandb sync` sends it."""

    mode: Literal["online", "offline"] = "online"
    """`online` needs `wandb login`. `offline`: nothing leaves this machine; the run folder has the files."""
    entity: str = ""
    """The user or team that the run belongs to; empty: that of `wandb login`."""
    group: str = ""
    """A group of runs that are shown together."""
    tags: list[str] = Factory(list)
    """Tags of the run."""
    finish_seconds: int = field(default=300, validator=between(1, SECONDS))
    """Longest wait at the end of a run for what W&B has not sent. The rest stays on disk; `wandb sync` sends it."""
