"""The config of the logger `trackio`."""

from attrs import frozen

from whet_tracking.config import TrackingConfig


@frozen
class TrackioConfig(TrackingConfig):
    """Keeps a run in Trackio's database on this machine, or sends it to a Space of Hugging Face."""

    space: str = ""
    """The Space, e.g. `me/runs`; empty: nothing leaves this machine."""
    group: str = ""
    """A group of runs that are shown together."""
