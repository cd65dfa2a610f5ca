"""Draw panels into an image. The only module that imports matplotlib. It does not change matplotlib's global state."""

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from whet_plot.series import SMOOTHED_FROM, Panel, Series, smooth

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5d3a9b", "#4d4d4d")
"""Colours that colour-blind readers can distinguish, too (Okabe and Ito 2008, darkest first)."""

LONGEST = 60
"""Longer names are cut to this number of characters."""


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw the panels, two or three in a row, and write the image atomically."""
    columns = len(panels) if len(panels) in (1, 3) else 2
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.3 * rows + 0.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_literal(title), fontsize=12, fontweight="bold")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    last = max(int(series.steps[-1]) for panel in panels for series in panel.series)
    for i, axis in enumerate(axes):
        if i >= len(panels):
            axis.set_visible(False)
            continue
        _panel(axis, panels[i], bottom=i + columns >= len(panels))
        axis.set_xlim(-0.02 * max(last, 1), 1.02 * max(last, 1))
    beside = path.with_name(f".{path.name}.tmp{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings():
            # A character that the font lacks is drawn as a box; a warning at the end of a run would not help.
            warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
            figure.savefig(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _panel(axis: Any, panel: Panel, bottom: bool) -> None:
    for series, colour in zip(panel.series, COLOURS * len(panel.series), strict=False):
        _curve(axis, series, colour)
    axis.set_title(_literal(panel.title), fontsize=10, loc="left")
    if bottom:
        axis.set_xlabel("step", fontsize=9)
        axis.tick_params(labelbottom=True)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.tick_params(labelsize=8, length=3, color="#888888")
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if len(panel.series) > 1 or panel.series[0].name.removeprefix("evaluation/") != panel.series[0].name:
        axis.legend(fontsize=8, frameon=False)


def _curve(axis: Any, series: Series, colour: str) -> None:
    label = _literal(series.name.removeprefix("evaluation/"))
    if series.band is not None:
        axis.fill_between(series.steps, *series.band.T, color=colour, alpha=0.16, linewidth=0, label="95 % interval")
    if series.sparse:
        axis.plot(series.steps, series.values, color=colour, linewidth=1.8, marker="o", markersize=3.5, label=label)
    elif len(series.steps) < SMOOTHED_FROM:
        axis.plot(series.steps, series.values, color=colour, linewidth=1.6, label=label)
    else:
        axis.plot(series.steps, series.values, color=colour, linewidth=0.8, alpha=0.35)
        axis.plot(series.steps, smooth(series.values), color=colour, linewidth=1.8, label=f"{label} (running mean)")


def _literal(text: str) -> str:
    """Return a name that matplotlib does not read as a formula or as a hidden label, cut to `LONGEST`."""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return text.replace("\\", "/").replace("$", r"\$").lstrip("_")
