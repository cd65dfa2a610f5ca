"""The installed check of weight syncs; see `whet.interfaces.weights.Probe`."""

from collections.abc import Callable
from importlib.metadata import entry_points

from whet.errors import PluginError, in_words
from whet.interfaces.weights import Probe
from whet.plugins.catalog import catalog, install_words

GROUP, FEATURE = "whet.probes", "weight-probe"
"""The entry-point group, and the word for it in the catalog."""


def missing_probe() -> str:
    """Return why weight syncs cannot be checked and what to install, as the end of a sentence. Empty: they can be."""
    found = sorted(point.value for point in entry_points(group=GROUP))
    if len(found) > 1:
        return f"weight syncs are checked by {' and '.join(found)}; remove all but one of their distributions"
    return "" if found else f"{install_words([catalog().features[FEATURE]])}, or set 0 to run without checks"


def load_probe() -> Callable[..., Probe]:
    """Return what builds the probe. Raises `PluginError`."""
    if missing := missing_probe():
        raise PluginError(f"weight syncs cannot be checked; {missing}")
    (point,) = entry_points(group=GROUP)
    try:
        made: Callable[..., Probe] = point.load()
    except Exception as error:  # the edge: a plugin is loaded
        raise PluginError(f"the check of weight syncs {point.value} cannot be used: {in_words(error)}") from error
    return made
