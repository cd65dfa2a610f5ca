"""Import paths of earlier versions that plugins use: each leads to where its module is now, with a warning.

They are kept for one version of core. `whet` asks here only for a module that it does not have. A distribution that a
room or a module of core has moved to names it as an entry point of the group `whet.moved`: `testing = "its_package"`.
"""

import importlib
import warnings
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from whet.installed import entry_points

MOVED = {
    "bounded": "data.bounded", "cluster": "runtime", "cluster.slices": "interfaces.workers",
    "cluster.wire": "runtime.wire", "compose": "run.compose", "config.load": "plan.load",
    "hookspecs": "plugins.hookspecs", "metrics": "data.metrics", "model": "data.model_info",
    "parts": "interfaces.algorithm", "prepare": "plan.prepare", "randomness": "data.randomness",
    "refit.link": "interfaces.weights", "run_folder": "data.files", "runtime.call": "runtime.hosts",
    "runtime.event_loop": "rollout.event_loop", "runtime.futures": "runtime.workers",
    "runtime.machine": "plan.machine", "spans": "data.spans", "steps": "interfaces.algorithm",
    "undecided": "interfaces.undecided",
}  # fmt: skip
"""Module of today, by the path of before; both without the leading `whet.`."""


class _Alias:
    """A loader that loads the module of today."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of today; for a package one that looks like it.

        Its `__path__` is empty: from that of the package, Python would load each module below a second time.
        """
        warnings.warn(f"{spec.name} has moved to {self._name}", DeprecationWarning, stacklevel=2)
        self._module = module = importlib.import_module(self._name)
        self._spec = module.__spec__
        if not hasattr(module, "__path__"):
            return module
        package = ModuleType(spec.name, module.__doc__)
        package.__path__ = []
        package.__getattr__ = lambda name: getattr(module, name)  # type: ignore[method-assign] # PEP 562
        return package

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module of today as it is, with its own name."""
        if module is self._module:
            module.__spec__ = self._spec


def find(name: str) -> ModuleSpec | None:
    """Return how a module of `whet` is imported by a path of before; None where there was none."""
    new = _today(name.removeprefix("whet."))
    return None if new is None else ModuleSpec(name, _Alias(new), is_package=True)  # type: ignore[arg-type]


def leading_on(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` (PEP 562) of a module whose names of before are in other modules, by name."""

    def find_name(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} has moved to {names[name]}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(names[name]), name)

    return find_name


def _today(path: str) -> str | None:
    """Return the whole name of today for a path of before, or for a path in a room of before."""
    elsewhere = {point.name: point.value for point in entry_points("whet.moved")}
    packages = {room: f"whet.{new}" for room, new in MOVED.items()} | elsewhere
    rooms = [path, *(path[:end] for end in range(len(path) - 1, 0, -1) if path[end] == ".")]
    room = next((room for room in rooms if room in packages), None)
    return None if room is None else packages[room] + path[len(room) :]
