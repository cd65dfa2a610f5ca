"""State that a component carries from step to step, apart from weights, e.g. a moving baseline or a curriculum.

Algorithms, advantage estimators, filters, environments and loggers may have the methods of `Stateful`. Every checkpoint
saves the state after its step, and a run that resumes from it loads the state before it continues.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

from whet.component import Selection
from whet.errors import PluginError, WhetError, in_words


@runtime_checkable
class Stateful(Protocol):
    """An optional extension of a component: state that checkpoints save."""

    def state(self) -> dict[str, Any]:
        """Return the state as builtins that JSON stores exactly: a float keeps its last bit, a key must be a string."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned."""


def states(components: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of the state of each component that has one. Raise `PluginError` if JSON would change it."""
    said = {name: _called(f"state() of {name}", one.state) for name, one in components.items() if has_state(one, name)}
    return {name: stored(f"state() of {name}", state) for name, state in said.items()}


def stored(name: str, state: Any) -> Any:
    """Return a copy of a state as JSON stores it. Raise `PluginError` if JSON would change it."""
    try:
        copy = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        words = "keep plain numbers, text, lists and mappings by text, e.g. by `.item()` or `.tolist()`"
        raise PluginError(f"{name} gave what JSON cannot store: {error}; {words}") from error
    if copy != state:
        words = "it holds a NaN; keep None instead" if repr(copy) == repr(state) else f"JSON returns {copy!r:.200}"
        raise PluginError(f"{name} gave {state!r:.200}; {words}")
    return copy


def has_state(component: object, name: str) -> TypeGuard[Stateful]:
    """Return whether a component has a state. Raise `PluginError` if nothing could load it."""
    state, load = (getattr(component, method, None) for method in ("state", "load"))
    if inspect.ismethod(state) and load is None and not inspect.signature(state).parameters:
        who = f"{name} ({type(component).__qualname__})"
        words = f"{who} has the method `state` and no `load`, so checkpoints would not save its state"
        raise PluginError(f"{words}; add `load`, or rename `state`")
    return callable(state) and callable(load)


def load_states(components: Mapping[str, object], saved: Mapping[str, Any]) -> None:
    """Load the saved state of each component that has one. A checkpoint of before may lack it."""
    for name, component in components.items():
        if has_state(component, name) and name in saved:
            check_ran(_called(f"load() of {name}", component.load, saved[name]), f"load() of {name}")


def _called(what: str, method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except WhetError:
        raise
    except Exception as error:
        raise PluginError(f"{what} failed: {in_words(error)}") from error


class Components:
    """The built components of a run whose states a checkpoint saves."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved
        self._built: dict[str, object] = {}

    def keep(self, selection: Selection, component: Any) -> Any:
        """Load the saved state of a component if it has one, and return the component."""
        if component is None:
            raise PluginError(f"`{selection.component.target}` returned None; return the component {selection.name!r}")
        name = f"{selection.kind}-{selection.name}-{len(self._built)}"
        self._built[name] = component
        load_states({name: component}, self._saved)
        return component

    def state(self) -> dict[str, Any]:
        """Return the states of all components that have one."""
        return states(self._built)


def check_ran(found: object, who: str) -> None:
    """Raise `PluginError` if a call of a plugin's function did nothing, but returned a coroutine or a generator."""
    if inspect.iscoroutine(found) or inspect.isgenerator(found) or inspect.isasyncgen(found):
        if not inspect.isasyncgen(found):
            found.close()
        raise PluginError(f"{who} did nothing: `{found.__qualname__}` must neither be `async def` nor contain `yield`")
