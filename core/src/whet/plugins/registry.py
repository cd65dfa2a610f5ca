"""Loads plugins one by one. A broken plugin is recorded with its error, and disturbs nothing that works without it."""

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import Distribution, EntryPoint, PackageMetadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pluggy
from attrs import frozen
from packaging.requirements import Requirement

from whet.component import CORE_VERSION, FILE_MODULE, KINDS, Component, Kind, Problem, file_module, import_file, loaded
from whet.config.messages import a_kind, choice_words, kind_word, nearest
from whet.errors import PluginError
from whet.installed import GROUP, distributions, normal
from whet.plugins import hookspecs
from whet.plugins.catalog import catalog, offered_words

if TYPE_CHECKING:
    from whet.config.sections import Config

_LAST_FRAMES = 4
_WRAPPED = ("whet_run", "whet_worker_group")
"""Hooks of core itself, which plugins wrap."""
_OF_RUNS = (*_WRAPPED, "whet_step_finished")
"""Hooks that an object of the section `hooks` can implement. The others were called before a run builds the object."""
_CORE = re.compile(r"\s*whet(?![\w.-])", re.IGNORECASE)
"""A requirement of core. To parse those of other distributions would take long."""
_KEPT = 512
"""What so many distributions declare is kept. `whet.installed` makes new ones for a folder that has changed."""


@frozen
class Source:
    """Where a plugin was found."""

    name: str
    """Name of the entry point, or the stem of a single file."""
    distribution: str
    """The distribution, or the path of a single-file plugin."""
    version: str = ""
    """Version of the distribution."""
    module: str = ""
    """The module that the entry point names. Empty for a single file."""


@frozen
class Offer:
    """A component together with the plugin that offers it."""

    component: Component
    distribution: str
    """The distribution, or the path of a single-file plugin."""
    source: Source

    @property
    def use(self) -> str:
        """Return the text that chooses this offer among others of its name: `DISTRIBUTION/NAME`, or `FILE/NAME`."""
        return f"{self.distribution if self.source.module else self.source.name}/{self.component.name}"


@frozen
class Broken:
    """A plugin, or a part of one, that could not be used."""

    name: str
    """Name of the entry point, or the stem of a single file."""
    distribution: str
    """The distribution, or the path of a single-file plugin."""
    reason: str
    """The fault on one line, with the place in the plugin if it is known."""
    kind: Kind | None = None
    """The only kind of component that may be missing because of this. None: any kind."""
    last_lines: str = ""
    """The last lines of the traceback, if the plugin raised."""

    def __str__(self) -> str:
        return f"{self.distribution} (plugin {self.name!r}): {self.reason}"


class Registry:
    """The plugins of this process: what they offer, and which of them could not be used."""

    def __init__(self) -> None:
        self.manager = new_manager()
        self.broken: list[Broken] = []
        self._offers: dict[Kind, dict[str, list[Offer]]] = {kind: {} for kind in KINDS}
        self._sources: dict[str, Source] = {}  # by the name that the manager has for the plugin
        self.wanted: list[str] = []
        """Distributions of the catalog that offer a requested name and are not installed."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return the loaded plugins, in the order of loading."""
        return tuple(self._sources.values())

    def offers(self, kind: Kind) -> dict[str, Offer]:
        """Return the components of a kind by what chooses them: the name, or `Offer.use` if it is offered twice."""
        named = sorted(self._offers[kind].items())
        return {offer.use if len(offers) > 1 else name: offer for name, offers in named for offer in offers}

    def contested(self, kind: Kind) -> dict[str, list[Offer]]:
        """Return the components of a kind that are offered more than once."""
        return {name: offers for name, offers in sorted(self._offers[kind].items()) if len(offers) > 1}

    def find(self, kind: Kind, name: str) -> Offer:
        """Return a component by its name or `Offer.use`. Raises `PluginError` with near names and broken plugins."""
        owner, _, short = name.rpartition("/")
        alike, wanted = self._offers[kind].get(short, []), normal(name)
        offers = [offer for offer in alike if not owner or normal(offer.use) == wanted]
        if len(offers) == 1:
            return offers[0]
        if offers:
            among = sorted({offer.distribution for offer in offers})
            forms = sorted({f"`use: {offer.use}`" for offer in offers})
            advice = f"choose one by {' or '.join(forms)}" if len(forms) > 1 else "rename one of these files"
            if len(among) == 1:
                among, advice = [f"{among[0]} twice"], "rename one of the two"
            raise PluginError(f"the {kind_word(kind)} {name!r} is offered by {' and '.join(among)}; {advice}")
        known = self._elsewhere(kind, short) or choice_words(name, self.offers(kind))
        owners = ", ".join(sorted(set(catalog().components.get(kind, {}).values()))) or "none is known"
        known = known or f"; no plugin that offers {a_kind(kind)} is installed; there are: {owners}"
        suspects = [str(broken) for broken in self.broken if broken.kind in (None, kind)]
        quote = f"; not usable, and might offer it: {'; '.join(suspects)}" if suspects else ""
        raise PluginError(f"there is no {kind_word(kind)} {name!r:.80}{known}{quote}")

    @property
    def here(self) -> set[str]:
        """Return the distributions and files that were found, usable or not."""
        return {source.distribution for source in self.sources} | {broken.distribution for broken in self.broken}

    def _elsewhere(self, kind: Kind, name: str) -> str:
        """Return which distribution that is not installed offers a name, or a similar one, as text. Empty: none."""
        meant = name if catalog().owner(kind, name) else catalog().near(kind, name)
        owner = catalog().owner(kind, meant) if meant else None
        if owner is None or owner in self.here:
            return ""
        if meant != name:
            return "" if nearest(name, self._offers[kind]) else f" (did you mean {meant!r}? {offered_words(owner)})"
        self.wanted.append(owner)
        return f"; {offered_words(owner)}"

    def problems(self, config: "Config") -> list[Problem]:
        """Return the problems that `whet_check_config` of every plugin finds. One whose hook fails becomes broken."""
        return [found for key in self._sources for found in self._ask(key, "whet_check_config", Problem, config=config)]

    def targets(self, hook: str) -> dict[str, str]:
        """Return the import paths that plugins name by a hook, by distribution. A plugin that fails is broken."""
        return {
            source.distribution: target for key, source in self._sources.items() for target in self._ask(key, hook, str)
        }

    def load_file(self, path: Path) -> None:
        """Load a single file as a plugin, once. A broken one is recorded."""
        file, key = path.resolve(), file_module(path)
        if key not in self._sources:
            self.load(Source(file.stem, str(file)), key, lambda: import_file(file))

    def load(self, source: Source, key: str, load: Callable[[], Any]) -> None:
        """Load one plugin, which the manager names `key`. A broken one is recorded."""
        try:
            plugin = load()
            register(self.manager, plugin, key)
        except (Exception, SystemExit) as error:  # a command that works without the plugin must not fail
            self.broken.append(_broken(source, _reason(error), error=error))
            return
        self._sources[key] = source
        for kind in KINDS:
            for component in self._ask(key, f"whet_{kind}", Component, kind):
                self._add(kind, component, plugin, source)

    def _ask(self, key: str, hook: str, wanted: type, kind: Kind | None = None, **arguments: Any) -> list[Any]:
        """Call a hook of one plugin. Return the valid items, and record the others as broken."""
        good, bad = list[Any](), list[Broken]()
        source, plugin = self._sources[key], self.manager.get_plugin(key)
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            if implementation.plugin is not plugin:
                continue
            try:
                given = implementation.function(**{name: arguments[name] for name in implementation.argnames})
                items = _items(given, wanted, optional=kind is None)
            except (Exception, SystemExit) as error:
                bad.append(_broken(source, f"its hook {hook} failed: {_reason(error)}", kind, error))
                continue
            good.extend(item for item in items if isinstance(item, wanted))
            strange = [item for item in items if not isinstance(item, wanted)]
            reasons = [f"its hook {hook} gave {item!r:.80}, wanted a {wanted.__name__}" for item in strange]
            bad.extend(_broken(source, reason, kind) for reason in reasons)
        self.broken.extend(bad)
        return good

    def _add(self, kind: Kind, component: Component, plugin: Any, source: Source) -> None:
        fault = _fault(component) or _absent(component := _located(component, plugin), plugin)
        if fault:
            reason = f"its {kind_word(kind)} {component.name!r:.80} {fault}"
            self.broken.append(_broken(source, reason, kind))
            return
        offer = Offer(component, source.distribution, source)
        self._offers[kind].setdefault(component.name, []).append(offer)


def load_plugins() -> Registry:
    """Load the plugins of all installed distributions. Broken ones are recorded."""
    registry = Registry()
    for entry, source in _entries(registry.broken):
        registry.load(source, f"{source.distribution}:{source.name}", entry.load)
    return registry


def new_manager() -> pluggy.PluginManager:
    """Return a manager that knows the hooks of whet and no plugin."""
    manager = pluggy.PluginManager("whet")
    manager.add_hookspecs(hookspecs)
    return manager


def _broken(source: Source, reason: str, kind: Kind | None = None, error: BaseException | None = None) -> Broken:
    lines = traceback.format_exception(error)[-_LAST_FRAMES:] if error is not None else []
    return Broken(source.name, source.distribution, reason, kind, "".join(lines).rstrip())


def _entries(broken: list[Broken]) -> Iterator[tuple[EntryPoint, Source]]:
    """Yield the entry points of whet, sorted. Record distributions that cannot be read or need another core."""
    found: list[tuple[EntryPoint, Source]] = []
    seen: set[str] = set()
    for distribution in distributions():
        name = "an unreadable distribution"
        try:
            if not _is_plugin(distribution):
                continue  # to parse the metadata of all that is installed would take long
            metadata = _metadata(distribution)
            name = str(metadata["Name"])
            entries = _plugins(distribution)
            if not entries or normal(name) in seen:  # Python imports the first on the path
                continue
            seen.add(normal(name))
            reason = _needs_other_core(distribution)
        except Exception as error:
            broken.append(Broken("?", name, f"its metadata cannot be read: {_reason(error)}"))
            continue
        if reason:
            broken.extend(Broken(entry.name, name, reason) for entry in entries)
        else:
            version = str(metadata["Version"])
            found.extend((entry, Source(entry.name, name, version, entry.value)) for entry in entries)
    yield from sorted(found, key=lambda pair: (pair[1].distribution, pair[1].name))


@functools.lru_cache(maxsize=_KEPT)
def _is_plugin(distribution: Distribution) -> bool:
    return f"[{GROUP}]" in (distribution.read_text("entry_points.txt") or "")


@functools.lru_cache(maxsize=_KEPT)
def _plugins(distribution: Distribution) -> tuple[EntryPoint, ...]:
    return tuple(entry for entry in distribution.entry_points if entry.group == GROUP)


@functools.lru_cache(maxsize=_KEPT)
def _metadata(distribution: Distribution) -> PackageMetadata:
    return distribution.metadata  # it is parsed each time that it is asked for


@functools.lru_cache(maxsize=_KEPT)
def _needs_other_core(distribution: Distribution) -> str | None:
    return other_core(_metadata(distribution).get_all("Requires-Dist") or distribution.requires or [])


def other_core(requirements: Iterable[str]) -> str | None:
    """Return for which whet a distribution with some requirements is made, where that is not this one."""
    for requirement in (Requirement(line) for line in requirements if _CORE.match(line)):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(CORE_VERSION, prereleases=True):
            return f"it is made for whet{requirement.specifier}, and this is whet {CORE_VERSION}"
    return None


def register(manager: pluggy.PluginManager, plugin: Any, key: str | None = None, whose: str = "its") -> None:
    """Register a plugin, or raise and leave the manager as it was.

    Raises `PluginError` for hooks that whet does not know, that have other arguments, or that replace core's own.
    """
    before = manager.is_registered(plugin)
    try:
        manager.register(plugin, name=key)
        _check_hooks(manager, plugin, whose)
    except BaseException as error:
        if not before and manager.is_registered(plugin):
            manager.unregister(plugin)
        if isinstance(error, pluggy.PluginValidationError):
            where, *_, what = str(error).splitlines()
            raise PluginError(f"{whose} hook {where.rpartition(' hook ')[2]}: {what}") from error
        raise


def _check_hooks(manager: pluggy.PluginManager, plugin: Any, whose: str) -> None:
    for hook in manager.get_hookcallers(plugin) or ():
        own = [implementation for implementation in hook.get_hookimpls() if implementation.plugin is plugin]
        if not hook.has_spec() and not all(implementation.optionalhook for implementation in own):
            known = [name for name in vars(manager.hook) if getattr(manager.hook, name).has_spec()]
            raise PluginError(f"whet has no hook {hook.name!r}{choice_words(hook.name, known)}")
        if whose != "its" and hook.name not in _OF_RUNS and hook.has_spec():
            raise PluginError(f"{whose} {hook.name} is never called: plugins are asked before a run builds the object")
        if any(inspect.iscoroutinefunction(implementation.function) for implementation in own):
            raise PluginError(f"{whose} hook {hook.name} is `async def`, and nobody would await it; write `def`")
        if hook.name in _WRAPPED and not all(implementation.wrapper for implementation in own):
            raise PluginError(
                f"{whose} {hook.name} would replace that of core; write @hookimpl(wrapper=True) and yield"
            )
    for name in (name for name in dir(plugin) if name.startswith("whet_")):
        value = inspect.getattr_static(plugin, name)
        value = getattr(value, "__func__", value)  # of a static method or a class method
        is_own = inspect.isfunction(value) and (not inspect.ismodule(plugin) or value.__module__ == plugin.__name__)
        if is_own and not hasattr(value, "whet_impl"):
            raise PluginError(f"{whose} function {name} is not marked with @whet.hookimpl, so it would never be called")
    if whose != "its" and not manager.get_hookcallers(plugin):
        raise PluginError(f"{whose} class {type(plugin).__name__} has no function marked with @whet.hookimpl")


def _items(given: object, wanted: type, optional: bool) -> list[Any]:
    if given is None and optional:
        return []
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
        raise PluginError(f"it gave {given!r:.80}, wanted an iterable of {wanted.__name__}")
    return list(given)


def _fault(component: Component) -> str | None:
    """Return what is wrong with a component, as the end of a sentence. None: nothing."""
    name, config = component.name, component.config
    if not isinstance(name, str) or not name or name.strip("abcdefghijklmnopqrstuvwxyz0123456789-"):
        return "has a name that is not in lower case with dashes"
    if not isinstance(config, type) or not attrs.has(config):
        return f"has the config {config!r:.80}, wanted an attrs class"
    if any(field.alias == "use" for field in attrs.fields(config)):
        return f"has a config {config.__name__} with a field named `use`, which is the name of the component"
    for what, target in (("target", component.target), ("facts", component.facts or "module:name")):
        if not isinstance(target, str) or not all(target.rpartition(":")[1:]):
            return f"has the {what} {target!r:.80}, wanted 'package.module:name'"
    return None


def _absent(component: Component, plugin: Any) -> str | None:
    """Return which target a single file lacks, as the end of a sentence. None: it lacks none. The file is imported."""
    for what, target in (("target", component.target), ("facts", component.facts)):
        if target.startswith(f"file:{getattr(plugin, '__file__', '')}:") and loaded(target) is None:
            return f"has the {what} {target.rpartition(':')[2]!r}, which the file does not define"
    return None


def _located(component: Component, plugin: Any) -> Component:
    """Return the component, with targets named by path if its plugin is a single file that workers must import."""
    name, file = getattr(plugin, "__name__", ""), getattr(plugin, "__file__", None)
    if not file or not name.startswith(FILE_MODULE) or name != file_module(file):
        return component

    def locate(target: str) -> str:
        module, _, attribute = target.rpartition(":")
        return f"file:{file}:{attribute}" if attribute and module in ("", name, Path(file).stem) else target

    return attrs.evolve(component, target=locate(component.target), facts=locate(component.facts))


def _reason(error: BaseException) -> str:
    """Return what was raised, and where in the plugin, on one line."""
    text = " ".join(str(error).split())[:300]
    said = text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    ours = (__file__, pluggy.__path__[0], "<frozen importlib", str(Path(inspect.__file__).parent / "importlib"))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    frames = [frame for frame in frames if frame.filename != import_file.__code__.co_filename]
    if not frames or isinstance(error, SyntaxError):  # the text of a syntax error has its place
        return said
    place = "/".join(Path(frames[-1].filename).parts[-2:])
    return f"{said} ({place}, line {frames[-1].lineno})"
