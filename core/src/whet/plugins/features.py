"""Features that one installed distribution brings beside components: data files, checks of weight syncs, forecasts."""

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from whet.data.messages import ResponseReader
from whet.errors import PluginError, in_words
from whet.interfaces.chat import Chat
from whet.interfaces.data import DataReader
from whet.interfaces.weights import Probe
from whet.plugins.catalog import catalog, install_words

READER = ("whet.data", "data-files", "data files are read")
PROBE = ("whet.probes", "weight-probe", "weight syncs are checked")
RESPONSES = ("whet.responses", "responses", "responses are read")
RECORDER = ("whet.recorders", "token-record", "rollouts are recorded token by token")
FORECAST = ("whet.forecasts", "memory-forecast", "the peaks of memory are predicted")
APART = ("whet.environment_processes", "environment-processes", "environments are played in processes of their own")
"""The entry-point group of a feature, the word for it in the catalog, and what it does."""


def missing_reader() -> str:
    """Return why data files cannot be read and what to install, as the end of a sentence. Empty: they can be."""
    return _missing(*READER)


@functools.cache
def reader() -> DataReader:
    """Return the reader. Raises `PluginError` with what to install."""
    made: DataReader = _load("data files need a plugin", *READER)
    return made


@functools.cache
def responses() -> Callable[[Chat], ResponseReader] | None:
    """Return what makes the reader of a chat's responses. None: no installed distribution brings one."""
    return None if _missing(*RESPONSES) else _load("", *RESPONSES)


def missing_recorder() -> str:
    """Return why no tokens are recorded and what to install, as the end of a sentence. Empty: they are."""
    return _missing(*RECORDER)


def load_recorder() -> Callable[..., Any]:
    """Return what builds the recorder of tokens. Raises `PluginError` with what to install."""
    made: Callable[..., Any] = _load("no tokens are recorded", *RECORDER)
    return made


def missing_probe() -> str:
    """Return why weight syncs cannot be checked and what to install, as the end of a sentence. Empty: they can be."""
    return _missing(*PROBE)


def load_probe() -> Callable[..., Probe]:
    """Return what builds the probe. Raises `PluginError` with what to install."""
    made: Callable[..., Probe] = _load("weight syncs cannot be checked", *PROBE)
    return made


def missing_processes() -> str:
    """Return why environments cannot have processes and what to install, as the end of a sentence. Empty: they can."""
    return _missing(*APART)


def load_apart() -> Callable[..., Any]:
    """Return what builds an environment in processes of its own. Raises `PluginError` with what to install."""
    made: Callable[..., Any] = _load("environments cannot have processes of their own", *APART)
    return made


@functools.cache
def forecasting() -> Any:
    """Return the module that predicts peaks of memory, with `known_peaks` and `check`. None: there is none."""
    return None if _missing(*FORECAST) else _load("", *FORECAST)


def _missing(group: str, feature: str, does: str) -> str:
    found = sorted(point.value for point in entry_points(group=group))
    if len(found) > 1:
        return f"{does} by {' and '.join(found)}; remove all but one of their distributions"
    return "" if found else install_words([catalog().features[feature]])


def _load(without: str, group: str, feature: str, does: str) -> Any:
    if missing := _missing(group, feature, does):
        raise PluginError(f"{without}; {missing}")
    (point,) = entry_points(group=group)
    try:
        return point.load()
    except Exception as error:  # the edge: a plugin is loaded
        raise PluginError(f"{point.value}, by which {does}, cannot be used: {in_words(error)}") from error
