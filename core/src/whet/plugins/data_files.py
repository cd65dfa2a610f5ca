"""The installed reader of data files; see `whet.interfaces.data`."""

import functools
from importlib.metadata import entry_points

from whet.errors import PluginError, in_words
from whet.interfaces.data import DataReader
from whet.plugins.catalog import catalog, install_words

GROUP, FEATURE = "whet.data", "data-files"
"""The entry-point group, and the word for it in the catalog."""


def missing_reader() -> str:
    """Return why data files cannot be read and what to install, as the end of a sentence. Empty: they can be."""
    found = sorted(point.value for point in entry_points(group=GROUP))
    if len(found) > 1:
        return f"data files are read by {' and '.join(found)}; remove all but one of their distributions"
    owner = catalog().features.get(FEATURE)
    return "" if found else install_words([owner]) if owner else "no installed distribution reads data files"


@functools.cache
def reader() -> DataReader:
    """Return the reader. Raises `PluginError` with what to install."""
    if missing := missing_reader():
        raise PluginError(f"data files need a plugin; {missing}")
    (point,) = entry_points(group=GROUP)
    try:
        made: DataReader = point.load()
    except Exception as error:  # the edge: a plugin is loaded
        raise PluginError(f"the reader of data files {point.value} cannot be used: {in_words(error)}") from error
    return made
