"""Build the parts of a run from its plan, and run it.

load YAML -> structure -> problems -> plan -> worker groups -> parts -> run -> close in reverse order
"""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import Factory, define, field, frozen

from whet.config.sections import RunSection
from whet.data.files import disk_errors, remove_folder
from whet.data.spans import Spans
from whet.errors import WhetError, WorkerLost
from whet.interfaces.algorithm import Parts
from whet.plan.prepare import Prepared, prepare
from whet.run import checkpoint
from whet.run.builder import begin, build_parts
from whet.run.inputs import read_inputs
from whet.run.interrupts import Interrupts
from whet.run.models import Attempt
from whet.run.observers import Observers
from whet.run.recovery import Recovery
from whet.run.resume import held_fingerprint, nothing_left, refuse_another, run_fingerprint
from whet.run.run_folder import RunFolder, closing_all

if TYPE_CHECKING:
    from whet.interfaces.algorithm import Steps
    from whet.interfaces.backend import Backend
    from whet.plan.load import ConfigSource
    from whet.plugins.registry import Registry


@frozen
class Outcome:
    """How a run ended."""

    folder: Path
    steps: int
    """Steps finished in all."""
    finished: bool
    stopped_by: int | None = None
    """The signal that ended it early."""
    before: bool = False
    """Whether it had ended before, so that nothing was left to do and nothing was started."""
    epochs: float | None = None
    """Epochs of a run that states them."""
    total: int = 0
    """Steps of the whole run."""


def run(
    source: "ConfigSource", overrides: Sequence[str] = (), *, registry: "Registry | None" = None,
    began: float | None = None,
) -> Outcome:  # fmt: skip
    """Run a config from beginning, or from its last checkpoint, to the end.

    `began`: the start of the command, in seconds since the epoch. The time to the first step counts from there.
    """
    with Interrupts().listening() as interrupts:
        prepared = prepare(source, overrides, config_only=False, registry=registry, began=began)
        with _claimed(prepared.config.run) as folder:
            if (done := _finished(prepared, folder)) is not None:
                return Outcome(folder.path, done, finished=True, before=True, epochs=prepared.config.run.epochs)
            prepared.refuse_elsewhere()
            with _OpenRun(prepared, folder, interrupts).opened() as open_run:
                return _run_attempts(open_run)


def _finished(prepared: Prepared, folder: RunFolder) -> int | None:
    """Return the steps of a run that is finished. None: something is left to do. Nothing is started.

    If the last run attempt was killed at its very end, the journal gets the line that is missing. Raises
    `CheckpointError` if the folder holds another run.
    """
    config, done = prepared.config, checkpoint.newest(folder)
    left = done < (config.run.steps or 1) or (config.run.export and not _exported(folder))
    if left or not (folder.path / "identity.json").exists():
        return None
    with closing_all([]) as closers:
        inputs = read_inputs(prepared, folder, {}, Spans(), lambda status: None, closers, evaluation=False)
        own = run_fingerprint(config, prepared.model, inputs.data, inputs.training, prepared.models)
        if (held := held_fingerprint(folder, config.run.resume)) is not None:
            refuse_another(f"{folder.path} holds", held, own, config)
        if not nothing_left(config.run, prepared.roles.algorithm.records_per_step, folder, done, inputs.data):
            return None
    folder.remove("scratch")  # of a run attempt that was killed at its very end
    if _told(folder, "opened", "closed", "failed") != "closed":
        folder.journal("closed")
    return done


def _run_attempts(open_run: "_OpenRun") -> Outcome:
    """Run until the end. If workers are lost and recovery allows it, run again from the last checkpoint."""
    while True:
        try:
            with open_run.attempt() as parts:
                return _run_attempt(parts, open_run.folder, open_run.interrupts)
        except WorkerLost as error:
            if not open_run.grants_another(error):
                raise open_run.last_error(error) from error.__cause__


def _run_attempt(parts: Parts, folder: RunFolder, interrupts: Interrupts) -> Outcome:
    """Run what is left of a run, until its end or a signal."""
    config, steps = parts.config, parts.steps
    if steps.done < steps.total:
        if steps.done == 0 and config.evaluation.at_start and config.evaluation.environments:
            began = time.perf_counter()
            steps.log_start(parts.evaluate(0), time.perf_counter() - began)
        with _saving(parts):
            parts.hooks.whet_run(algorithm=parts.algorithm, parts=parts)
    finished = steps.done >= steps.total
    if finished and config.run.export:
        pressed = steps.stopped_by == signal.SIGINT or interrupts.abandon
        interrupts.moment, interrupts.pressed = "export", pressed
        _export(parts.backend, folder, steps.done)
    return Outcome(folder.path, steps.done, finished, steps.stopped_by, total=steps.total)


@contextmanager
def _saving(parts: Parts) -> Iterator[None]:
    """Save the last finished step when a signal ends the loop over the steps, or when its code leaves it early."""
    from whet.run.steps import Interrupted

    try:
        yield
    except Interrupted:
        parts.steps.save_now()
    else:
        parts.steps.leave()


def _export(backend: "Backend", folder: RunFolder, step: int) -> None:
    """Write the final model once, whole. If a run attempt fails to write it, the next one does."""
    if _exported(folder):
        return
    target, partial = folder.path / "model", folder.path / "model.partial"
    folder.remove("model.partial")
    with checkpoint.removed(folder, partial):
        backend.export(partial)
    with disk_errors(target):
        folder.check_held()
        remove_folder(target)
        partial.rename(target)
    folder.journal("exported", step=step)


def _exported(folder: RunFolder) -> bool:
    """Return whether the model was written whole after the last step."""
    return (folder.path / "model").is_dir() and _told(folder, "step", "exported") == "exported"


def _told(folder: RunFolder, *events: str) -> str | None:
    """Return which of these events the journal has last."""
    found = [row["event"] for row in folder.events() if row.get("event") in events]
    return found[-1] if found else None


@contextmanager
def open(source: "ConfigSource", *overrides: str, registry: "Registry | None" = None) -> Iterator[Parts]:
    """Open a run as a library: `with whet.open("it.yaml", "algorithm.group_size=4") as parts:`.

    `source` is the path of a config file or a mapping: `{"extends": "it.yaml", "algorithm": {"group_size": 4}}`.
    When a signal ends a wait for rollouts, the last finished step is saved, and the program goes on after the body.
    """
    prepared = prepare(source, overrides, config_only=False, registry=registry)
    prepared.refuse_elsewhere()
    with (
        _claimed(prepared.config.run) as folder, _OpenRun(prepared, folder).opened() as open_run,
        open_run.attempt() as parts, _saving(parts),
    ):  # fmt: skip
        yield parts


@define
class _OpenRun:
    """A run that is open in this process: its folder is locked, its loggers are on."""

    prepared: Prepared
    folder: RunFolder
    interrupts: Interrupts = Factory(Interrupts)
    """What Ctrl-C does outside of steps."""
    observers: Observers = field(init=False)
    recovery: Recovery = field(init=False)
    built: bool = field(default=False, init=False)
    """Whether all parts have been built once: a worker that is lost earlier ends the run at once."""
    owned: bool = field(default=False, init=False)
    """Whether the folder is known to belong to this run. The journal of another run is not written."""
    steps: "Steps | None" = field(default=None, init=False)
    """The steps of the present run attempt, once it is built."""

    @contextmanager
    def opened(self) -> Iterator["_OpenRun"]:
        """Close the loggers at the end, and write into the journal how the run ended."""
        with closing_all([]) as closers:
            self.observers = Observers(self.prepared.loaded.registry.manager, self.folder)
            closers += [lambda: self.folder.remove("scratch"), self.observers.close]
            self.recovery = Recovery(self.prepared.config.cluster.recovery, self.folder)
            try:
                yield self
            except Exception as error:
                self.observers.failed = True
                self._journal("failed", error=type(error).__name__, message=str(error)[:2000])
                raise
            except BaseException as error:  # a second Ctrl-C: it was ended, and did not fail
                self._journal("closed", by=type(error).__name__)
                raise
            self.folder.journal("closed")

    def _journal(self, event: str, **details: str) -> None:
        if self.owned:
            with suppress(WhetError):  # a full disk must not hide what failed
                self.folder.journal(event, **details)

    @contextmanager
    def attempt(self) -> Iterator[Parts]:
        """Build all parts, and close them at the end. The attempt begins after the last checkpoint."""
        with closing_all([self.folder.settle]) as closers:
            self.interrupts.moment = "start-up"
            attempt = Attempt(self.folder, self.observers, closers, self.recovery, self.interrupts, again=self.built)
            self.steps = None
            with self.interrupts.then_closing():
                begun = begin(self.prepared, attempt)
                self.owned = True
                parts = build_parts(self.prepared, attempt, begun)
                self.built, self.steps = True, parts.steps
                yield parts

    def grants_another(self, error: WorkerLost) -> bool:
        """Return whether there is another run attempt after this error."""
        stopped = self.interrupts.abandon or (self.steps is not None and self.steps.stopped_by is not None)
        if not self.built or stopped:
            return False
        saved = checkpoint.latest(self.folder)
        return self.recovery.grant_run(error, saved.step if saved else 0)

    def last_error(self, error: WorkerLost) -> WorkerLost:
        """Return the error that ends the run; its cause names a signal that was ending the run anyway."""
        if self.steps is None or self.steps.stopped_by is None:
            return error
        name = signal.Signals(self.steps.stopped_by).name
        cause = f"{error.cause}; {name} was ending the run, which continues after its last checkpoint"
        return WorkerLost(error.role, error.rank, error.phase, cause, error.last_words, error.details)


@contextmanager
def _claimed(section: RunSection) -> Iterator[RunFolder]:
    """Lock a run folder during the body."""
    folder = RunFolder(section.folder, private_records=section.private_records)
    with closing_all([]) as closers:
        folder.claim()
        closers.append(folder.release)
        yield folder
