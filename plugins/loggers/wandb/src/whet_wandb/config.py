"""The config of the logger `wandb`."""

from typing import Literal

from attrs import Factory, field, frozen

from whet.config.bounds import SECONDS, between
from whet_tracking.config import TrackingConfig


@frozen
class WandbConfig(TrackingConfig):
    """Sends a run to Weights & Biases, or keeps it in the run folder until `wandb sync` sends it."""

    project: str = ""
    """The project that the run belongs to; empty: `WANDB_PROJECT`, else `whet`."""
    name: str = ""
    """The run's name; empty: `WANDB_NAME`, else that of the run folder."""
    mode: Literal["", "online", "offline"] = ""
    """`online` needs `wandb login`. `offline`: nothing leaves this machine; the run folder has the files. Empty:
    `WANDB_MODE`, which may also be `disabled`, else `online`.
    """
    entity: str = ""
    """The user or team that the run belongs to; empty: `WANDB_ENTITY`, else that of `wandb login`."""
    group: str = ""
    """A group of runs that are shown together; empty: `WANDB_RUN_GROUP`, else none."""
    tags: list[str] = Factory(list)
    """Tags of the run; empty: `WANDB_TAGS`, else none."""
    finish_seconds: int = field(default=300, validator=between(1, SECONDS))
    """Longest wait at the end of a run for what W&B has not sent. The rest stays on disk; `wandb sync` sends it."""
