"""Builds the parts of a run in the order in which they need each other. Each stage returns what it made.

begin         worker processes, which import in parallel; inputs; the folder at its last checkpoint      -> Begun
build_parts   models -> weights of the checkpoint -> rollouts, evaluation, weight sync, steps             -> Parts
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from whet.component import AdvantagesFacts, Selection, Spec
from whet.config.build import build_selection, to_spec
from whet.config.run import seconds_of
from whet.config.structure import unstructure
from whet.data.metrics import Metrics, merge
from whet.interfaces.algorithm import OfflineParts, OnlineParts
from whet.interfaces.logger import Event, RunInfo
from whet.interfaces.state import Components
from whet.plan.prepare import Prepared
from whet.plugins.endpoints import InstalledEndpoints
from whet.plugins.features import RECORDER
from whet.plugins.registry import register
from whet.run import checkpoint
from whet.run.background import Background
from whet.run.colocation import Turns
from whet.run.handles import BackendHandle, TimedRollouts, timed
from whet.run.inputs import make_evaluator, read_inputs
from whet.run.interrupts import announce
from whet.run.models import Attempt, Begun, Models, start_models
from whet.run.resume import open_run
from whet.run.stall_monitor import StallMonitor
from whet.run.start_workers import make_worker_groups
from whet.run.startup_time import Startup
from whet.run.weight_sync import make_probe

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from whet.config.sections import RecordSection, RunSection
    from whet.data.batch import Batch
    from whet.evaluation.result import EvaluationResult
    from whet.interfaces.chat import Tokenizer
    from whet.interfaces.weights import Probe
    from whet.rollout.recorder import Recorder
    from whet.rollout.stream import RolloutStream
    from whet.run.steps import Sinks


def begin(prepared: Prepared, attempt: Attempt) -> Begun:
    """Start worker processes, which import while the driver opens the inputs and the run folder."""
    config, folder, spans, status = prepared.config, attempt.folder, attempt.spans, attempt.observers.status
    startup = Startup(time.time() if attempt.again else prepared.spans[0].begin)
    if not attempt.again:
        spans.add(prepared.spans)
    places, closers = prepared.plan.roles, attempt.closers
    worker_groups = make_worker_groups(config.cluster, folder.name, places, prepared.roles, folder.logs, closers)
    stalls = StallMonitor(spans, folder.logs / "waits.log", config.cluster.deadlines.notice, worker_groups.cluster)
    closers.append(stalls.close)
    with spans.phase("run", "prepare"):
        inputs = read_inputs(prepared, folder, attempt.roles, spans, status, closers)
        run = open_run(prepared, folder, inputs.data, inputs.training, status, attempt.again)
    info = RunInfo(folder.path.resolve(), folder.name, unstructure(config), run.total, run.done)
    return Begun(worker_groups, stalls, inputs, run, info, startup)


def build_parts(prepared: Prepared, attempt: Attempt, begun: Begun) -> OfflineParts | OnlineParts:
    """Build all parts of a run. Its models have the weights of its last checkpoint, the generator among them."""
    from whet.run.steps import Steps

    config, run, roles, folder, inputs = prepared.config, begun.run, prepared.roles, attempt.folder, begun.inputs
    manager = prepared.loaded.registry.manager
    for chosen in config.hooks:
        hooks = build_selection(chosen, begun.info)
        register(manager, hooks, whose=f"the hook {chosen.name!r} of {chosen.distribution}: its")
        attempt.closers.append(partial(manager.unregister, hooks))
    if attempt.again:
        attempt.observers.rewind(run.saved.step if run.saved else -1)
    else:
        for chosen in config.loggers:
            attempt.observers.add(chosen.name, build_selection(chosen, begun.info))
    saved = run.saved.state if run.saved else {}
    attempt.observers.load(saved.get("loggers", {}))
    components = Components(saved.get("components", {}))
    began = folder.began().timestamp()
    folder.journal("opened", after_step=run.done, steps=run.total, process=os.getpid(), began=began)
    if inputs.data is not None:
        inputs.data.begin()
    models, sync = start_models(prepared, attempt, begun)
    if run.saved:
        with attempt.spans.phase("backend", "load"):
            for name, model in models.trained.items():
                model.load(run.saved.part(name))
    endpoints = InstalledEndpoints(config.endpoint, prepared.loaded.registry, prepared.roles.extras)
    stream = _stream(prepared, attempt, begun, models, endpoints)
    probe = None
    if sync is not None and models.generator is not None:
        probe = make_probe(
            config.weight_sync.probe, config.run.seed, config.rollout.temperature, prepared.plan.max_context, roles,
            prepared.model, models.within_turn(), models.generator.direct(), inputs.chat, models.probe,
        )  # fmt: skip
        sync.connect(
            models.backend, models.generator, before=models.turns.syncing, probe=probe,
            after=[*(role.follow for role in models.older), *([stream.set_version] if stream else [])],
        )  # fmt: skip
    evaluate: Callable[[int], Metrics] = lambda step: {}  # noqa: E731
    if inputs.evaluation:
        status = attempt.observers.status
        evaluator = make_evaluator(
            prepared, inputs.evaluation, models.generator, inputs.chat, status, endpoints, models.loop
        )
        evaluate = _evaluation(evaluator, attempt, models.turns, stream, run.total)
    recording = models.within_turn(timed(attempt.spans, names={"score": "record"}))
    recorder = _recorder(config.rollout.record, roles.backend.outputs_given, recording, inputs.chat.pieces, folder)
    served, per_step = ExitStack(), roles.algorithm.records_per_step
    sinks = _sinks(
        attempt, begun, models, stream, recorder, evaluate, probe, config.run, per_step, served.close, components
    )
    steps = Steps(
        folder, config.run, run.done, config.evaluation.every, attempt.spans, sinks, begun.startup, run.total,
        saved.get("algorithm", {}), attempt.interrupts,
    )  # fmt: skip
    if limit := config.run.time_limit:
        steps.end_by(prepared.spans[0].begin + seconds_of(limit), f"run.time_limit {limit} is over")
    attempt.closers.append(steps.close)
    backends = {name: handle for name, handle in attempt.roles.items() if isinstance(handle, BackendHandle)}
    for handle in (models.backend, *backends.values()):
        handle.now = lambda: {"step": steps.done + 1, "steps": steps.total}
        handle.weights_change = steps.weights_change
    models.backend.weights_change = partial(steps.weights_change, policy=True)

    def sync_weights(*, version: int) -> None:
        steps.check_version(version)
        if sync is not None:
            sync(version=version)

    loss = getattr(config.algorithm.config, "loss", None)
    common: dict[str, Any] = {
        "config": config, "algorithm": components.keep(config.algorithm, build_selection(config.algorithm)),
        "keep": components.keep, "hooks": attempt.observers.hooks, "backend": models.backend, "roles": backends,
        "generator": models.generator, "chat": inputs.chat,
        "loss": to_spec(loss) if isinstance(loss, Selection) else Spec(""), "sync_weights": sync_weights,
        "steps": steps, "evaluate": evaluate, "seed": config.run.seed,
    }  # fmt: skip
    if sync is not None:
        sync(version=run.done)
    if config.endpoint.serve:
        served.callback(_serve(prepared, attempt, models, inputs.chat, stream, endpoints))
    if stream is None:
        assert inputs.data is not None  # the plan refuses a run without rollouts and without data
        return OfflineParts(**common, data=inputs.data)

    def generation() -> None:
        steps.check_sent()
        models.turns.generation()

    rollouts = TimedRollouts(
        stream, attempt.spans, steps.interruptible, lambda batch: recorder.taken(steps.done + 1, batch), generation
    )
    return OnlineParts(**common, rollouts=rollouts)


def _stream(
    prepared: Prepared, attempt: Attempt, begun: Begun, models: Models, endpoints: InstalledEndpoints
) -> "RolloutStream | None":
    """Return the rollouts of training, at the position of the checkpoint. None: the run trains on data files."""
    from whet.rollout.stream import RolloutStream

    config, roles = prepared.config, prepared.roles
    if models.generator is None or not begun.inputs.training:
        return None
    stream = RolloutStream(
        begun.inputs.training, models.generator, begun.inputs.chat,
        attrs.evolve(config.rollout, max_context=prepared.plan.max_context),
        group_size=roles.algorithm.group_size or 1, seed=config.run.seed,
        filters=[build_selection(chosen) for chosen in getattr(config.algorithm.config, "filters", ())],
        deadline_seconds=config.cluster.deadlines.episode, status=attempt.observers.status, loop=models.loop,
        endpoints=endpoints, greedy=any(found.greedy_sample for found in roles.of(AdvantagesFacts).values()),
        journal=attempt.folder.journal,
    )  # fmt: skip
    attempt.closers.append(stream.close)
    if begun.run.saved:
        stream.restore(begun.run.saved.state["rollouts"])
    return stream


def _evaluation(
    play: "Callable[[], EvaluationResult]", attempt: Attempt, turns: Turns, stream: "RolloutStream | None", total: int
) -> Callable[[int], Metrics]:
    """Return a function that evaluates after a step and writes the result to the run folder."""

    def evaluate(step: int) -> Metrics:
        if stream is not None and step >= total:
            stream.close()  # no step is left that could use its rollouts
        turns.generation()
        # No other requests meanwhile: batches, and so rounding errors, must not depend on timing.
        with attempt.spans.phase("run", "evaluate"), stream.paused() if stream else nullcontext():
            result = play()
        label = f"step-{step:06d}"
        for name, rows in result.rows(f"{label}-").items():
            attempt.folder.append(f"evaluations/{name}", rows)
        attempt.folder.write_json(f"evaluations/{label}.json", result.summary(f"{label}-", step=step))
        for one in result.environments:
            attempt.folder.listener(Event("evaluation", step, one.name, one.summary(), one.records))
        return result.metrics

    return evaluate


def _recorder(section: "RecordSection", outputs: Any, backend: Any, pieces: Any, folder: Any) -> "Recorder":
    """Return the recorder of episodes. If no installed distribution records tokens, the journal states why."""
    from whet.rollout.recorder import MessageRecorder

    if not (missing := RECORDER.missing()):
        made: Recorder = RECORDER.load()(section, outputs, backend, pieces)
        return made
    if section.every:
        folder.journal("no_tokens", why=missing)
    return MessageRecorder()


def _sinks(
    attempt: Attempt, begun: Begun, models: Models, stream: "RolloutStream | None", recorder: "Recorder",
    evaluate: Callable[[int], Metrics], probe: "Probe | None", section: "RunSection", records_per_step: int | None,
    hang_up: Callable[[], object], components: Components,
) -> "Sinks":  # fmt: skip
    """Return the functions that the end of a step calls. `hang_up` closes the endpoint of the run."""
    from whet.run.steps import Sinks

    position: dict[str, Any] = {"rollouts": stream.state() if stream else {}}
    saving, warned, newest = Background(), list[str](), checkpoint.newest(attempt.folder)
    # After an error, the save that is under way becomes durable before the workers are closed.
    attempt.closers.append(lambda: None if attempt.interrupts.abandon else saving.wait())
    data = begun.inputs.data

    def records(step: int, batch: "Batch") -> Mapping[str, Any]:
        if stream is None:
            return {}
        # Read here and not when saving: a signal may end the run after the stream has returned the next batch.
        position["rollouts"] = stream.state()
        consumed = stream.collect()
        rows = recorder.rows(consumed.trained, batch)
        file = f"rollouts/step-{step:06d}.jsonl"
        attempt.folder.publish_later(file, lambda: Event("rollouts", step, rows=rows()))
        return consumed.entry()

    def log_step(step: int, numbers: Mapping[str, float]) -> None:
        attempt.recovery.finished(step)
        attempt.observers.log(step, numbers)
        known = {name: number for name, number in numbers.items() if not name.startswith(("seconds/", "memory/"))}
        position.update(components=components.state(), loggers=attempt.observers.state(), metrics=known)

    def save(step: int, carried: Mapping[str, Any], ends: bool) -> None:
        if ends and models.turns.sides:  # the save would wait for the endpoint's requests in flight
            try:
                hang_up()
            except Exception:  # a failure here must not prevent the checkpoint
                log.exception("the endpoint could not be closed")
        state = {**position, "algorithm": carried, "identity": begun.run.fingerprint}
        if data is not None and records_per_step is not None:
            state["data"] = data.position(step, records_per_step)
        best, metrics = section.keep_best, position.get("metrics", {})
        if best and (words := checkpoint.missing(best, metrics)) and words not in warned:
            warned.append(words)
            announce(words)
        _begin_save(attempt, models, section, saving, step, state, newest)

    def gather() -> Metrics:
        others = [stream.metrics() if stream else {}, probe.metrics() if probe else {}]
        return merge([*others, models.turns.metrics()])

    return Sinks(records, evaluate, log_step, save, gather, saving)


def _begin_save(
    attempt: Attempt, models: Models, section: "RunSection", saving: Background, step: int, state: Mapping[str, Any],
    before: int,
) -> None:  # fmt: skip
    """Wait until the previous save is durable. Then save all models, or begin to save them.

    `before` is the step of the newest checkpoint when this run attempt began.
    """
    since, folder = time.perf_counter(), attempt.folder
    saving.wait()
    saves: dict[str, checkpoint.Save] = {one.part: one.save for one in models.older}
    for name, model in models.trained.items():
        saves[name] = partial(model.start_save, background=section.save_in_background)
    complete = checkpoint.begin(folder, step, state, saves)

    def finish() -> None:
        with attempt.spans.phase("run", "write"):
            folder.sync()
            complete()
            checkpoint.prune(folder, section.keep, section.keep_best, before)
        folder.journal("saved", step=step)

    saving.start(finish, since)
    if not section.save_in_background:
        saving.wait()


def _serve(
    prepared: Prepared, attempt: Attempt, models: Models, chat: "Tokenizer", stream: "RolloutStream | None",
    endpoints: InstalledEndpoints,
) -> Callable[[], None]:  # fmt: skip
    """Serve the model of the run from its first weights on, and return the function that closes the endpoint."""
    from whet.rollout.gate import Gate

    assert models.generator is not None  # the plan refuses to serve without one
    models.turns.generation()  # requests before the first step need a generator that is awake
    close = endpoints.serve(
        models.generator, chat, prepared.config.rollout, max_context=prepared.plan.max_context,
        seed=prepared.config.run.seed, gate=stream.gate if stream else Gate(), folder=attempt.folder,
        loop=models.loop,
    )  # fmt: skip
    attempt.closers.append(close)
    return close
