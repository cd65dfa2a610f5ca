"""The config of the logger `plot`."""

from attrs import Factory, field, frozen, validators

_IMAGE = validators.matches_re(r".*[^/]\.(?i:png|svgz?|pdf|jpe?g|webp|e?ps|tiff?)")


@frozen
class PlotConfig:
    """Draws curves of the whole run as a PNG when the run ends."""

    file: str = field(default="plot.png", validator=_IMAGE, metadata={"writes": True})
    """Image file, relative to the run folder. `.svg` and `.pdf` work, too."""
    panels: list[list[str]] = Factory(list)
    """Panels, each a list of metric names or patterns such as `evaluation/*/reward`. Empty: evaluation rewards,
    training reward, response length and losses. A panel without any metric of the run is left out."""
