"""The steps of a run: where to begin, when to stop, and all that happens between two optimizer steps.

    for step in parts.steps:         starts after the last checkpoint, ends on SIGTERM
        ...
        step.log(metrics)            as often as needed; metrics merge by their kind
        step.finish(batch)           metrics, evaluation, loggers, hooks, checkpoint when due

An algorithm must finish each step that it begins. It keeps values for later steps in `steps.state`.
"""

import copy
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field, frozen

from whet.data import metrics as merging
from whet.data.batch import Batch
from whet.data.metrics import Metric
from whet.data.randomness import derive_seed
from whet.data.spans import Spans
from whet.errors import PluginError, WorkerLost, in_words
from whet.interfaces.logger import Event
from whet.interfaces.state import stored
from whet.run.background import Background
from whet.run.interrupts import Interrupts, acknowledge, announce, on_signals
from whet.run.run_folder import RunFolder
from whet.run.startup_time import BEFORE, Startup

if TYPE_CHECKING:
    from whet.config.sections import RunSection


MARGIN, SPARE_SECONDS = 1.2, 20.0
"""The expected time of a step and a save, relative to the longest so far; the expected time of the end of a run."""
UNKNOWN_SAVE_SECONDS = 60.0
"""A first save is expected to take as long as a step, and at least this many seconds."""


class Interrupted(BaseException):
    """A signal ended a wait; the last finished step can be saved. Code that handles errors must not catch it."""


@define
class Step:
    """One step of a run."""

    number: int
    """Counted from 1."""
    seed: int
    """Derive this step's randomness from it."""
    _steps: "Steps"
    _metrics: dict[str, Metric] = field(factory=dict, init=False)

    def log(self, metrics: Mapping[str, Metric | float]) -> None:
        """Add metrics; those of one name are merged by their kind. A number is a mean over one item."""
        given = {name: one if isinstance(one, Metric) else merging.mean(one) for name, one in metrics.items()}
        for name, one in given.items():
            if not isinstance(one.value, Real) and one is not metrics[name]:
                raise PluginError(f"step.log: {name} is {one.value!r:.60}, wanted a number or a whet.Metric")
        self._metrics = merging.merge([self._metrics, given])

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of builtins to `tables/` of the run folder, and send them to loggers."""
        if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,99}", name, re.ASCII):
            raise ValueError(f"a table cannot have the name {name!r:.100}; use letters, digits, - and _")
        self._steps.publish(f"tables/step-{self.number:06d}-{name}.jsonl", Event("table", self.number, name, rows=rows))

    def due(self, every: int) -> bool:
        """Return whether an action of every `every` steps is due now. After the last step it is; 0: only then."""
        return self._steps.is_last(self.number) or (every > 0 and self.number % every == 0)

    def finish(self, batch: Batch) -> None:
        """End the step: write metrics, evaluate, tell loggers and hooks, save when due."""
        self._steps.finish(self, self._metrics, batch)


@frozen
class Sinks:
    """The functions that the end of a step calls, in this order."""

    records: Callable[[int, Batch], Mapping[str, Any]]
    """Write the rollouts of a step, and return their entry of the journal."""
    evaluate: Callable[[int], Mapping[str, Metric]]
    """Evaluate after a step."""
    log: Callable[[int, Mapping[str, float]], None]
    """Send metrics to loggers and hooks."""
    save: Callable[[int, Mapping[str, Any], bool], None]
    """(step, `Steps.state`, whether a signal ends the run): write a checkpoint, or begin to write it."""
    gather: Callable[[], Mapping[str, Metric]]
    """Return metrics that others collected meanwhile, e.g. the rollout stream."""
    saving: Background = field(factory=Background)
    """The save that `save` has begun."""


class Steps:
    """Iterates over the steps that are left."""

    def __init__(
        self, run: RunFolder, section: "RunSection", done: int, evaluate_every: int, spans: Spans, sinks: Sinks,
        startup: Startup | None = None, total: int = 0, state: Mapping[str, Any] | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:  # fmt: skip
        """`total`: steps to take in all; 0: those of the section."""
        self.total = total or section.steps or 0
        """Steps of the run in all."""
        self.state: dict[str, Any] = dict(state or {})
        """The values, besides weights, that an algorithm keeps from step to step: builtins that JSON stores exactly.
        They are saved with each checkpoint, and a resumed run has them again."""
        self.saved_state = copy.deepcopy(self.state)
        """`state` as the last finished step left it."""
        self.done = done
        """Steps finished so far, those of earlier run attempts included."""
        self.stopped_by: int | None = None
        """Signal that ended the loop early."""
        self._run, self._section, self._spans, self._sinks = run, section, spans, sinks
        self.publish = run.publish
        self._evaluate_every, self._startup, self._first = evaluate_every, startup, done + 1
        self._saved = self._policy = self._sent = done
        self._warned = False
        """Whether it was said that the weights of step `_policy`, the last that trained the policy, were not sent."""
        self._limits: list[tuple[float, str]] = []
        self._longest = 0.0
        """Seconds of the longest step of this run attempt. The first counts only while it is the only one."""
        self._evaluation = 0.0
        """Seconds of the longest evaluation of this run attempt."""
        self._interrupts = interrupts or Interrupts()
        self._doing: Literal["", "waiting", "evaluating", "saving"] = ""
        """The present activity: a wait that a signal ends, an evaluation, or a save."""
        self._current: int | None = None  # the step that was begun and is not finished
        self._trained = False
        """Whether weights have changed in the present step."""
        self._began = time.perf_counter()
        self._before: dict[str, Metric] = {}
        self._listening = ExitStack()

    def is_last(self, number: int) -> bool:
        """Return whether no step follows this one."""
        return number >= self.total

    def __iter__(self) -> Iterator[Step]:
        with self._listening:
            self._listening.enter_context(on_signals(self._stop))
            self._interrupts.moment = "closing"  # what follows the loop
            if self._before:
                self._record(0, self._before)
            while self.done < self.total and self.stopped_by is None:
                self._sinks.saving.check()
                self._began = time.perf_counter()
                number = self.done + 1
                step = Step(number, derive_seed(self._section.seed, "step", number), self)
                self._current, self._trained = number, False
                yield step
                if self.done != number:
                    raise PluginError(f"step {number} was not finished: the algorithm must call step.finish(batch)")
            self.save_now()

    def leave(self) -> None:
        """Save the last finished step of a loop that was left early, unless a further step has begun."""
        if self._current is None:
            self.save_now()

    def check_version(self, version: int) -> None:
        """Raise `PluginError` unless this is the number of the present step, or of the last one after its end."""
        wanted = self.done if self._current is None else self._current
        if version != wanted:
            raise PluginError(f"sync_weights(version={version!r}) in step {wanted}; wanted version=step.number")
        self._sent = version

    def check_sent(self) -> None:
        """Warn once if a step before this one has trained the policy and its weights were not sent."""
        if self._sent < self._policy <= self.done and not self._warned:
            self._warned = True
            announce(
                f"step {self._policy} trained the policy, and the generator samples with the weights of step "
                f"{self._sent}; call parts.sync_weights(version=step.number) between training and step.finish"
            )

    def weights_change(self, *, policy: bool = False) -> None:
        """Mark the present step as one that changes weights: from now on a signal waits until it is finished."""
        self._trained = True
        if policy and self._current is not None:
            self._policy, self._sent = self._current, min(self._sent, self._current - 1)

    def stop(self) -> None:
        """See `whet.interfaces.algorithm.Steps.stop`."""
        self.stopped_by = self.stopped_by or signal.SIGTERM

    def end_by(self, moment: float, why: str) -> None:
        """See `whet.interfaces.algorithm.Steps.end_by`."""
        self._limits.append((moment, why))

    def log_start(self, metrics: Mapping[str, Metric], seconds: float = 0.0) -> None:
        """Add metrics from before the first step, as the row of step 0. `seconds`: the time of their evaluation."""
        self._before, self._evaluation = merging.merge([self._before, metrics]), max(self._evaluation, seconds)

    def close(self) -> None:
        """Stop handling signals. After an error, the traceback may keep the loop over the steps alive for long."""
        self._listening.close()

    def finish(self, step: Step, metrics: Mapping[str, Metric], batch: Batch) -> None:
        """See `Step.finish`."""
        number, evaluation = step.number, 0.0
        if number != self._current:
            raise PluginError(f"step {number} is finished already; call step.finish(batch) once in each step")
        if not isinstance(batch, Batch):
            raise PluginError(f"step {number}: step.finish got {batch!r:.60}, wanted the batch of the step")
        for key, value in self.state.items():
            stored(f"steps.state[{key!r}]", {key: value})
        merged = _apart(metrics, self._sinks.gather())
        consumed = self._sinks.records(number, batch)
        if step.due(self._evaluate_every):
            began = time.perf_counter()
            try:
                with self._while("evaluating"):
                    merged = _apart(merged, self._sinks.evaluate(number))
            except WorkerLost:
                raise  # a run that recovers repeats the step
            except Exception as error:
                self._end(number, merged, batch, consumed)
                self._save_after(error)
                raise
            evaluation = time.perf_counter() - began
            self._evaluation = max(self._evaluation, evaluation)
        self._end(number, merged, batch, consumed)
        seconds = time.perf_counter() - self._began - evaluation
        self._longest = max(self._longest, seconds) if number > self._first + 1 else seconds
        self._mind_time()
        if step.due(self._section.save_every):
            self._save()

    def _end(self, number: int, metrics: Mapping[str, Metric], batch: Batch, consumed: Mapping[str, Any]) -> None:
        """Write the metrics of a step, and count it as finished."""
        self._record(number, metrics, batch.tokens)
        self.done, self.saved_state, self._current = number, copy.deepcopy(self.state), None
        self._run.journal("step", step=number, **consumed)

    def _save_after(self, error: Exception) -> None:
        """Save the last finished step, whose evaluation has failed."""
        announce(f"the evaluation after step {self.done} failed: saving step {self.done}, then ending")
        try:
            self.save_now()
        except Exception as failed:
            error.add_note(f"step {self.done} could not be saved: {in_words(failed)}")

    @contextmanager
    def _while(self, doing: Literal["waiting", "evaluating", "saving"]) -> Iterator[None]:
        before, self._doing = self._doing, doing
        try:
            yield
        finally:
            self._doing = before

    def _record(self, number: int, metrics: Mapping[str, Metric], tokens: int = 0) -> None:
        """Write a step's metrics and spans to the run folder, and tell loggers and hooks."""
        spans, rows = self._spans.drain(), list[dict[str, Any]]()
        seconds: dict[str, float] = {"seconds/step": time.perf_counter() - self._began}
        for span in spans:
            times = {"begin": round(span.begin, 6), "seconds": round(span.seconds, 6)}
            rows.append({"step": number, "role": span.role, "phase": span.phase, **times})
            if number > self._first or span.phase not in BEFORE:
                name = f"seconds/{span.role}.{span.phase}"
                seconds[name] = seconds.get(name, 0.0) + span.seconds
        if self._startup is not None:
            seconds |= self._startup.metrics(spans, seconds["seconds/step"], number == self._first)
        numbers = merging.plain({**metrics, **({"tokens": merging.total(tokens)} if tokens else {})})
        numbers |= {name: round(value, 6) for name, value in seconds.items()}
        if taken := numbers.keys() & {"step", "time"}:
            raise PluginError(f"a metric is named {min(taken)!r}, a key of every row in metrics.jsonl; rename it")
        self._run.append("spans.jsonl", rows)
        self._run.append("metrics.jsonl", [{"step": number, "time": round(time.time(), 3), **numbers}])
        if histograms := [{"step": number, **row} for row in merging.histogram_rows(metrics)]:
            self._run.publish("histograms.jsonl", Event("histograms", number, rows=histograms))
        self._sinks.log(number, numbers)

    def _save(self) -> None:
        with self._while("saving"), self._spans.phase("run", "save"):
            self._run.settle()
            self._sinks.save(self.done, self.saved_state, self.stopped_by is not None)
        self._saved = self.done

    def _mind_time(self) -> None:
        """End the run as SIGTERM does, if the time left before the nearest limit is too short for a step and a save."""
        if not self._limits or self.stopped_by is not None or self.is_last(self.done):
            return
        moment, why = min(self._limits)
        saving, left = self._sinks.saving, moment - time.time()
        save = (saving.longest or max(self._longest, UNKNOWN_SAVE_SECONDS)) * (1 + saving.busy)
        evaluation = self._evaluation if Step(self.done + 1, 0, self).due(self._evaluate_every) else 0.0
        if left < MARGIN * (self._longest + evaluation + save) + SPARE_SECONDS:
            self.stop()
            took = f"a step took up to {self._longest:.0f} s, "
            took += f"its evaluation {evaluation:.0f} s, " if evaluation else ""
            took += f"and a save is expected to take {save:.0f} s"
            announce(f"{why} in {max(left, 0.0):.0f} s; {took}: saving step {self.done}, then ending")

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """End the body at once on a signal. This is for waits during which the weights do not change.

        If weights have changed earlier in the step, a signal waits for its end: they are no longer those of the last
        finished step.
        """
        if self._trained:
            yield
            return
        with self._while("waiting"):
            if self.stopped_by is not None:
                raise Interrupted
            yield

    def _stop(self, number: int) -> None:
        # A warning that a scheduler sends before SIGTERM ends the run in the same way.
        again, self.stopped_by = self.stopped_by is not None, signal.SIGTERM if number == signal.SIGUSR1 else number
        if again and number == signal.SIGINT:
            self._interrupts.at_once()
        if not again:
            acknowledge(number, self._what_follows())
        if self._doing == "waiting":
            raise Interrupted

    def _what_follows(self) -> str:
        """Return the words for what happens after a signal, and after a second Ctrl-C."""
        again = "; Ctrl-C again ends at once, without saving"
        if self._doing == "saving" or (self._saved == self.done and self._current is None and self._sinks.saving.busy):
            return f"saving step {self.done}, then ending{again}"
        if self._doing == "evaluating":
            return f"finishing the evaluation after step {self._current}, then saving{again}"
        if self._current is not None and self._doing != "waiting":
            return f"finishing step {self._current}, then saving{again}"
        if self._saved != self.done:
            return f"saving step {self.done}, then ending{again}"
        kept = f"step {self.done} is saved already" if self.done else "no step is finished, so nothing is saved"
        return f"ending; {kept}; Ctrl-C again ends at once"

    def save_now(self) -> None:
        """Save the last finished step, unless it is saved already, and wait for the save that is under way.

        A second SIGTERM does not end the save early.
        """
        with on_signals(self._stop):
            if self._saved != self.done:
                self._save()
            with self._while("saving"), self._spans.phase("run", "save"):
                self._sinks.saving.wait()


def _apart(logged: Mapping[str, Metric], built_in: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return all metrics. Raise `PluginError` if the algorithm or its loss has named one as the run names its own."""
    if taken := sorted(logged.keys() & built_in.keys()):
        raise PluginError(f"a metric of the algorithm or its loss is named {taken[0]!r}, as one of the run; rename it")
    return {**logged, **built_in}
