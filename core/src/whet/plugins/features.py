"""Features that one installed distribution brings beside components: data files, checks of weight syncs, forecasts."""

import functools
from typing import Any

from attrs import frozen

from whet.errors import PluginError, in_words
from whet.installed import entry_points
from whet.interfaces.data import DataReader
from whet.plugins.catalog import catalog, install_words


@frozen
class Feature:
    """What a distribution brings by an entry point."""

    group: str
    """The group of the entry point."""
    word: str
    """The word for the feature in the catalog."""
    does: str
    """What it does."""
    without: str
    """What is so without it."""

    def missing(self) -> str:
        """Return why it is not there and what to install, as the end of a sentence. Empty: it is there."""
        found = sorted(point.value for point in entry_points(self.group))
        if len(found) > 1:
            return f"{self.does} by {' and '.join(found)}; remove all but one of their distributions"
        return "" if found else install_words([catalog().features[self.word]])

    def load(self) -> Any:
        """Return what its entry point names. Raises `PluginError` with what to install."""
        if missing := self.missing():
            raise PluginError(f"{self.without}; {missing}")
        (point,) = entry_points(self.group)
        try:
            return point.load()
        except Exception as error:  # the edge: a plugin is loaded
            raise PluginError(f"{point.value}, by which {self.does}, cannot be used: {in_words(error)}") from error


READER = Feature("whet.data", "data-files", "data files are read", "data files need a plugin")
PROBE = Feature("whet.probes", "weight-probe", "weight syncs are checked", "weight syncs cannot be checked")
CHAT = Feature("whet.chats", "chat", "conversations are tokenised", "conversations cannot be tokenised")
RECORDER = Feature("whet.recorders", "token-record", "rollouts are recorded token by token", "no tokens are recorded")
FORECAST = Feature(
    "whet.forecasts", "memory-forecast", "the peaks of memory are predicted",
    "no machine but this one can be planned for",
)  # fmt: skip
APART = Feature(
    "whet.environment_processes", "environment-processes", "environments are played in processes of their own",
    "environments cannot have processes of their own",
)  # fmt: skip


@functools.cache
def reader() -> DataReader:
    """Return the reader. Raises `PluginError` with what to install."""
    made: DataReader = READER.load()
    return made


@functools.cache
def chats() -> Any:
    """Return the module with `ChatTokenizer`, a `Chat`, and `given_template`. Raises `PluginError`: what to install."""
    return CHAT.load()


@functools.cache
def forecasting() -> Any:
    """Return the module that predicts memory, with `known_peaks`, `check` and `given_machine`. None: there is none."""
    return None if FORECAST.missing() else FORECAST.load()
