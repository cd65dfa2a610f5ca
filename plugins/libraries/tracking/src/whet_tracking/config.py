"""The settings that all loggers of experiment trackers have."""

from attrs import field, frozen, validators

from whet.config.bounds import between

MOST = 1 << 20


@frozen
class TrackingConfig:
    """What becomes a table, and how often."""

    project: str = field(default="whet", validator=validators.min_len(1))
    """The project that the run belongs to."""
    name: str = ""
    """The run's name; empty: that of the run folder."""
    rollouts_every: int = field(default=10, validator=between(0, MOST))
    """Steps from one table of rollouts to the next, beginning with step 1; 0: no such tables."""
    rollouts: int = field(default=16, validator=between(1, 64))
    """Rows of a table of rollouts."""
    episodes: int = field(default=64, validator=between(0, MOST))
    """Rows of the table of each evaluation; 0: no such tables."""
