"""The hooks of this plugin: Pythons of environments are checked before a run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Problem, Selection
from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Yield a problem for each Python of an environment that is not there, or in which it cannot be played."""
    for path, section in config.played():
        if section.worker is not None and section.worker.python:
            words = _unfit(section.component, section.worker.python)
            yield from (Problem(f"{path}.worker.python", one) for one in words)


def _unfit(selection: Selection, python: str) -> list[str]:
    """Return why an environment cannot be played in its Python. Empty: it can."""
    from whet.installed import normal
    from whet.runtime.interpreters import faults, find, probe, versions
    from whet.runtime.process import extra_folders

    target, offered = selection.component.target, selection.distribution
    modules = ["whet_envworkers", *([] if target.startswith("file:") else [target.partition(":")[0]])]
    held = versions((offered, "whet-envworkers"))
    wanted = {name: held[normal(name)] for name in (offered, "whet-envworkers") if normal(name) in held}
    try:
        return faults(probe(find(python), modules, list(wanted), extra_folders()), wanted)
    except ConfigError as error:
        return error.problems
