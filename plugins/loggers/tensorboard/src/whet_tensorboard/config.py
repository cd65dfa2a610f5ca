"""The config of the logger `tensorboard`."""

from attrs import field, frozen, validators


@frozen
class TensorboardConfig:
    """Metrics and config of a run for TensorBoard."""

    folder: str = field(default="tensorboard", validator=validators.min_len(1), metadata={"writes": True})
    """Where the event files go, relative to the run folder; it belongs to this run alone."""
