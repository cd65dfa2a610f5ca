"""The config of the logger `tensorboard`."""

from attrs import field, frozen, validators


@frozen
class TensorboardConfig:
    """Writes metrics, histograms and config of a run for TensorBoard."""

    folder: str = field(default="tensorboard", validator=validators.min_len(1), metadata={"writes": True})
    """Folder of the event files, relative to the run folder. Only this run may use it."""
