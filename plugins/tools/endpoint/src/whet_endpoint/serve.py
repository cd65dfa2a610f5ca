"""Serves a model by any generator, without a run, until a signal ends it.

    MODEL, generator, overrides -> config -> plan -> workers -> generator -> endpoint

The config is checked and planned as that of a run, so every key of `generator`, `cluster`, `model`, `rollout` and
`endpoint` means here what it means there. Its algorithm and its backend are never built.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.config.sections import RolloutSection
from whet.config.structure import unstructure
from whet.data.model_info import locate, read_model
from whet.data.records import Sampling
from whet.errors import WhetError, WorkerError
from whet.interfaces.environment import Address
from whet.interfaces.logger import RunInfo
from whet.plan.load import load_config
from whet.plan.prepare import Prepared, prepare
from whet.plugins.registry import load_plugins
from whet.run.inputs import read_inputs
from whet.run.interrupts import CLOSING, acknowledge, on_signals
from whet.run.models import Attempt, start
from whet.run.observers import Observers
from whet.run.recovery import Recovery
from whet.run.run_folder import RunFolder, closing_all, temporary_run_folder
from whet.run.start_workers import make_worker_groups
from whet_endpoint.listener import Listener
from whet_endpoint.requests import Rules
from whet_endpoint.run import RunResponder, write_address

if TYPE_CHECKING:
    from whet.config.sections import Config
    from whet.interfaces.chat import Chat
    from whet.interfaces.logger import Logger
    from whet.plugins.registry import Registry
    from whet.rollout.event_loop import EpisodeLoop

STAND_INS = Path(__file__).with_name("stand_ins.py")


@frozen
class Served:
    """A model that is served."""

    model: str
    address: Address
    wait: Callable[[], None]
    """Wait until the generator fails for good, and raise its error. A signal ends the wait with `KeyboardInterrupt`."""


@contextmanager
def serving(
    model: str, generator: str, overrides: Sequence[str] = (), *, file: Path | None = None,
    registry: "Registry | None" = None, progress: "Logger | None" = None,
) -> Iterator[Served]:  # fmt: skip
    """Serve a model until the context ends. SIGINT and SIGTERM end the body with `KeyboardInterrupt`, at any time.

    `file` gets the address and the key as JSON, for this user alone, until the context ends. Raises `ConfigError` for
    what cannot be served here.
    """
    with on_signals(_Ending(), [signal.SIGINT, signal.SIGTERM]), temporary_run_folder("serve") as folder:
        prepared = _prepared(folder, model, generator, overrides, registry)
        with closing_all([]) as closers:
            observers = Observers(prepared.loaded.registry.manager, folder)
            closers.append(observers.close)
            if progress is not None:
                observers.add("progress", progress)
            attempt = Attempt(folder, observers, closers, Recovery(prepared.config.cluster.recovery, folder))
            served = _opened(prepared, attempt)
            if progress is not None:
                progress.close(failed=False)
            if file is not None:
                closers.append(lambda: file.unlink(missing_ok=True))
                write_address(file, served.address)
            yield served


def _prepared(
    folder: RunFolder, model: str, generator: str, overrides: Sequence[str], registry: "Registry | None"
) -> Prepared:
    """Return the plan of a config that has a generator alone."""
    document: dict[str, Any] = {
        "run": {"folder": str(folder.path), "steps": 1},
        "model": {"path": model},
        "algorithm": "nothing",
        "backend": "nothing",
        "generator": {"use": generator},
        "data": {"train": [{"path": "nothing"}]},
        "plugins": [str(STAND_INS)],
    }
    registry = load_plugins() if registry is None else registry
    if longest := _fitting(load_config(document, overrides, registry).config):
        document["rollout"] = {"max_tokens": longest}  # below the overrides
    prepared = prepare(document, overrides, config_only=False, trains=False, registry=registry)
    prepared.refuse_elsewhere("generator")
    return prepared


def _fitting(config: "Config") -> int | None:
    """Return the default of `rollout.max_tokens` for a model whose positions would leave no prompt beside core's."""
    model = read_model(locate(config.model.path, config.model.revision, config_only=True))
    limit = config.rollout.max_context or model.max_positions
    return max(1, limit // 2) if 0 < limit <= RolloutSection().max_tokens else None


def _opened(prepared: Prepared, attempt: Attempt) -> Served:
    """Start the generator's workers and open the endpoint."""
    from whet.rollout.event_loop import EpisodeLoop

    config, folder, closers = prepared.config, attempt.folder, attempt.closers
    place = prepared.plan.role("generator")
    groups = make_worker_groups(config.cluster, "serve", [place], prepared.roles, folder.logs, closers)
    info = RunInfo(folder.path.resolve(), folder.path.name, unstructure(config))
    status = attempt.observers.status
    inputs = read_inputs(prepared, folder, {}, attempt.spans, status, closers, training=False, evaluation=False)
    generator = start(prepared, attempt, ["generator"], groups.of, info)["generator"]
    loop, failure = EpisodeLoop(), Failure()
    closers.append(loop.close)
    responder = _responder(prepared, inputs.chat, generator, failure)
    closers.append(responder.close)
    opened = AsyncExitStack()
    address = loop.run(opened.enter_async_context(Listener(config.endpoint).open(responder, tuple)))
    closers.append(partial(_closed, loop, opened))
    return Served(prepared.model.path, address, failure.wait)


def _responder(prepared: Prepared, chat: "Chat", generator: Any, failure: "Failure") -> RunResponder:
    from whet.rollout.gate import Gate

    config = prepared.config
    sampling = Sampling(
        config.endpoint.max_tokens or config.rollout.max_tokens, config.rollout.temperature,
        stop=tuple(config.rollout.stop), stop_tokens=chat.stop_tokens,
    )  # fmt: skip
    lenient = config.endpoint.unsupported == "ignore"
    rules = Rules(sampling, fixed=False, lenient=lenient, extras=prepared.roles.extras)
    context = prepared.plan.max_context
    return RunResponder(generator, chat, Gate(), rules, context, config.run.seed, None, failed=failure.set)


def _closed(loop: "EpisodeLoop", opened: AsyncExitStack) -> None:
    """Close the endpoint, and cancel its requests."""
    loop.try_run(opened.aclose())


class Failure:
    """The error with which the generator failed for good."""

    def __init__(self) -> None:
        self._error: WorkerError | None = None
        self._set = threading.Event()

    def set(self, error: WorkerError) -> None:
        """Keep an error, and end the wait."""
        self._error = self._error or error
        self._set.set()

    def wait(self) -> None:
        """Wait for an error, and raise it."""
        self._set.wait()
        if self._error is not None:
            raise WhetError(f"the generator has failed, so nothing can be served: {self._error}") from self._error


class _Ending:
    """Handles signals: the first one ends the body; a further one ends the process, and the watchdog its workers."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, number: int) -> None:
        if self._told:
            os._exit(128 + number)
        self._told = True
        acknowledge(number, CLOSING)
        raise KeyboardInterrupt
