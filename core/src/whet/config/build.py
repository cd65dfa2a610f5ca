"""Builds components: from a selection on the driver, from a spec in a worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from whet.component import Selection, Spec, import_path, resolve
from whet.config.messages import kind_word
from whet.config.structure import structure, unstructure
from whet.errors import PluginError, WhetError, in_words


def to_spec(selection: Selection) -> Spec:
    """Return the spec of a selection, which can be sent to a worker. It includes the components inside its config."""
    config = unstructure(selection.config, portable=True)
    return Spec(selection.component.target, import_path(selection.component.config), config)


def build(spec: Spec, *args: Any) -> Any:
    """Import the target and call it with its config, then `args`. Works in any process, without a plugin registry."""
    config = structure(spec.config, resolve(spec.config_type), None) if spec.config_type else spec.config
    return _call(spec.target, config, *args)


def build_selection(selection: Selection, *args: Any) -> Any:
    """Import the target and call it with its config, then `args`. For the driver."""
    with named_errors(f"{kind_word(selection.kind)} {selection.name!r} cannot be built"):
        return _call(selection.component.target, selection.config, *args)


def _call(target: str, *args: Any) -> Any:
    """Return what a target builds. Raises `PluginError` if it is None, as of a function that forgets to return it."""
    if (built := resolve(target)(*args)) is None:
        raise PluginError(f"{target} returned None; it must return what it builds")
    return built


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Raise `PluginError` with these words in place of an error that a plugin's code in the body raises."""
    try:
        yield
    except WhetError:
        raise
    except Exception as error:
        raise PluginError(f"{what}: {in_words(error)}") from error
