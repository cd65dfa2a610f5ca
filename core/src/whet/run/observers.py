"""Observers of a run: its loggers and the plugins' hooks. An observer that fails never ends the run."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import evolve

from whet.errors import PluginError, in_words
from whet.interfaces.logger import Event, Logger
from whet.interfaces.state import check_ran, has_state, load_states, states
from whet.run.run_folder import RunFolder

if TYPE_CHECKING:
    from whet.interfaces.algorithm import Algorithm, Parts
    from whet.interfaces.workers import WorkerGroup

log = logging.getLogger(__name__)
hookimpl = pluggy.HookimplMarker("whet")


class CoreHooks:
    """Core's own implementation of the hooks, which plugins can wrap."""

    @hookimpl(trylast=True)
    def whet_run(self, algorithm: "Algorithm[Any]", parts: "Parts") -> object:
        """Run the algorithm."""
        run: Callable[[Parts], object] = algorithm.run
        check_ran(run(parts), "the algorithm")
        return True

    @hookimpl(trylast=True)
    def whet_worker_group(self, group: "WorkerGroup") -> "WorkerGroup":
        """Return the group unchanged."""
        return group


class Observers:
    """The loggers and hooks of a run. Sends them metrics and the state of the run."""

    def __init__(self, manager: pluggy.PluginManager, folder: RunFolder) -> None:
        if not manager.has_plugin("whet"):
            manager.register(CoreHooks(), name="whet")
        self.hooks = manager.hook
        self.failed = False
        """Whether the run failed; loggers are told when they are closed."""
        self._folder = folder
        self._loggers: dict[str, Logger] = {}
        self._warned = set[str]()
        self._thread, self._events = threading.get_ident(), deque[Event]()
        folder.listener = self._events.append

    def add(self, name: str, logger: Logger) -> None:
        """Add a logger. Raises `PluginError` if it is None, or has only a part of what a state needs."""
        if logger is None:
            raise PluginError(f"the function that builds the logger {name!r} returned None; return the logger")
        has_state(logger, f"logger {name!r}")
        number = sum(key.rpartition("-")[0] == name for key in self._loggers)
        self._loggers[f"{name}-{number}"] = logger

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send a finished step's metrics to loggers and hooks."""
        self._tell("log", step, dict(numbers))
        for hook in reversed(self.hooks.whet_step_finished.get_hookimpls()):
            try:  # one by one: in a call of all, the first error is the end
                given = {"step": step, "metrics": dict(numbers)}
                check_ran(hook.function(*(given[name] for name in hook.argnames)), "it")
            except (Exception, SystemExit) as error:
                who, kind = hook.plugin, type(hook.plugin)
                name = getattr(who, "__name__", f"{kind.__module__}.{kind.__qualname__}")
                self._note(f"hook whet_step_finished of {name}", error)

    def status(self, text: str) -> None:
        """Send to loggers what the run waits for."""
        self._tell("status", text)

    def rewind(self, step: int) -> None:
        """Notify the loggers that the steps after this one are taken again; -1: all steps are."""
        self._tell("rewind", step)

    def state(self) -> dict[str, Any]:
        """Return the states of the loggers that have one."""
        found: dict[str, Any] = {}
        self._each(lambda name, logger: found.update(states({name: logger})))
        return found

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the states of the loggers from a checkpoint. Log a warning for each that belongs to none."""
        for name in sorted(saved.keys() - self._loggers.keys()):
            log.warning("the checkpoint has a state of the logger %s, and the run has no such logger", name)
        self._each(lambda name, logger: load_states({name: logger}, saved))

    def close(self) -> None:
        """Close the loggers. Safe to call twice."""
        self._tell("close", self.failed)
        self._loggers.clear()

    def _tell(self, method: str, *args: Any) -> None:
        # Events may happen on any thread, and while a logger is called.
        while self._events and threading.get_ident() == self._thread:
            self._each(partial(_send, self._events.popleft()))

        def call(name: str, logger: Logger) -> object:
            own = (dict(one) if isinstance(one, dict) else one for one in args)  # so that none can change another's
            return getattr(logger, method)(*own)

        self._each(call)

    def _each(self, call: Callable[[str, Logger], object]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                check_ran(call(name, logger), "it")
            except (Exception, SystemExit) as error:
                # A full dashboard, a lost connection or output that nobody reads any more (for which rich exits)
                # must not cost a training run: the logger is dropped.
                self._loggers.pop(name, None)
                self._note(f"logger {name}", error, ", and is not called any more")

    def _note(self, who: str, error: BaseException, then: str = "") -> None:
        if who not in self._warned:
            self._warned.add(who)
            log.warning("%s failed%s: %s", who, then, in_words(error))
        self._folder.journal("watcher failed", who=who, error=type(error).__name__, message=str(error)[:500])


def _send(event: Event, name: str, logger: Any) -> object:
    if not hasattr(logger, "event"):
        return None
    return logger.event(evolve(event, details=dict(event.details), rows=[*map(dict, event.rows)] or ()))
