"""The config of the logger `plot`."""

from attrs import Factory, field, frozen, validators


@frozen
class PlotConfig:
    """Curves of the whole run as a PNG, drawn when it ends."""

    file: str = field(default="plot.png", validator=validators.min_len(1), metadata={"writes": True})
    """Image file, relative to the run folder; `.svg` and `.pdf` work too."""
    panels: list[list[str]] = Factory(list)
    """Panels, each a list of metric names or patterns such as `evaluation/*/reward`; by default evaluation rewards,
    training reward, answer length and losses. A panel that the run has no metric for is left out."""
