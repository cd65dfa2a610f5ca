"""The launchers that are installed, and what to install for one that is not. See `whet.interfaces.launcher`."""

import functools
from importlib.metadata import EntryPoint

from whet.component import Problem
from whet.config.messages import choice_words
from whet.config.sections import ClusterSection
from whet.errors import PluginError, in_words
from whet.installed import entry_points
from whet.interfaces.launcher import Launching
from whet.plugins.catalog import catalog, install_words

GROUP, LOCAL, FEATURE = "whet.launchers", "local", "launcher-"
"""The entry-point group, core's own launcher, and the beginning of a launcher's word in the catalog."""


@functools.cache
def found() -> dict[str, EntryPoint]:
    """Return the entry points of the installed launchers, by name. They are looked up once."""
    return {point.name: point for point in entry_points(GROUP)}


@functools.cache
def launching(name: str) -> Launching:
    """Return an installed launcher that is not core's own. Raises `PluginError` with what to install."""
    if name not in found():
        raise PluginError(f"cluster.launcher {missing(name)}")
    try:
        made: Launching = found()[name].load()()
    except Exception as error:  # the edge: a plugin is loaded
        raise PluginError(f"the launcher {name!r} cannot be used: {in_words(error)}") from error
    return made


def address(section: ClusterSection) -> str:
    """Return the address of the cluster that a run joins. Empty: none, or the launcher is not installed."""
    return "" if section.launcher not in found() else launching(section.launcher).address(section)


def missing(name: str) -> str:
    """Return why a launcher cannot be used and what to install, as the end of a sentence. Empty: it can be."""
    if name == LOCAL or name in found():
        return ""
    if (owner := catalog().features.get(f"{FEATURE}{name}")) is not None:
        return f"is {name}; {install_words([owner])}"
    known = {word.removeprefix(FEATURE) for word in catalog().features if word.startswith(FEATURE)}
    return f"is {name!r:.80}, and there is no such launcher{choice_words(name, {LOCAL, *found(), *known})}"


def missing_launcher(section: ClusterSection) -> list[Problem]:
    """Return what is wrong with the launcher of a config."""
    words = missing(section.launcher)
    offered = f"{FEATURE}{section.launcher}" in catalog().features
    unused = section.workers == "inline" and offered  # nothing would start a process
    return [Problem("cluster.launcher", words)] if words and not unused else []
