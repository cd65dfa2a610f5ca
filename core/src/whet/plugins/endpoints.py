"""The endpoints of the installed plugin. The plugin is looked for when the first endpoint is asked for."""

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from whet.component import resolve
from whet.config.sections import EndpointSection
from whet.data.records import Sampling
from whet.errors import PluginError
from whet.interfaces.chat import Chat
from whet.interfaces.endpoint import Endpoints, RecordedSequence
from whet.interfaces.environment import Address
from whet.plugins.catalog import catalog, install_words
from whet.plugins.registry import Registry, load_plugins

if TYPE_CHECKING:
    from whet.interfaces.generator import Generator

HOOK, FEATURE = "whet_endpoints", "endpoint"
"""The hook that names the implementation, and the word for it in the catalog."""


def missing_endpoints(registry: Registry) -> str:
    """Return why no endpoint can be opened and what to install, as the end of a sentence; empty: one can be."""
    offers = registry.targets(HOOK)
    if len(offers) == 1:
        return ""
    if offers:
        return f"endpoints are offered by {' and '.join(sorted(offers))}; remove all but one of them"
    owner = catalog().features.get(FEATURE)
    if owner is not None and owner not in registry.here:
        return install_words([owner])
    broken = "; ".join(str(broken) for broken in registry.broken if broken.kind is None)
    return "no usable plugin opens endpoints" + (f"; not usable, and might: {broken}" if broken else "")


class InstalledEndpoints:
    """Opens endpoints by the plugin that offers them. Obeys `whet.interfaces.endpoint.Endpoints`."""

    def __init__(
        self, section: EndpointSection | None = None, registry: Registry | None = None,
        extras: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """`extras` are the optional parts of requests in the generator's facts."""
        self._section, self._registry, self._extras = section or EndpointSection(), registry, extras
        self._endpoints: Endpoints | None = None

    def open(
        self, sequence: RecordedSequence, chat: Chat, sampling: Sampling, ignore: Collection[str]
    ) -> AbstractAsyncContextManager[Address]:
        """Open an endpoint for one episode. Raises `PluginError` with what to install."""
        return self._found().open(sequence, chat, sampling, ignore)

    def serve(self, generator: "Generator", *arguments: Any, **options: Any) -> Callable[[], None]:
        """Serve the model of a run. Raises `PluginError` with what to install."""
        return self._found().serve(generator, *arguments, **options)

    def _found(self) -> Endpoints:
        if self._endpoints is None:
            registry = self._registry or load_plugins()
            if missing := missing_endpoints(registry):
                raise PluginError(f"an endpoint of the model needs a plugin; {missing}")
            (target,) = registry.targets(HOOK).values()
            self._endpoints = resolve(target)(self._section, self._extras)
        return self._endpoints
