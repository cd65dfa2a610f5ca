"""Builds the parts of a run, in the order in which they need each other: slices -> handles -> parts."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import attrs

from whet.component import Selection, Spec
from whet.config.build import build_selection, to_spec
from whet.config.structure import unstructure
from whet.data.metrics import Metrics, merge
from whet.data.spans import Spans
from whet.interfaces.algorithm import Parts
from whet.interfaces.logger import RunInfo
from whet.interfaces.weights import Places, TransferSpec
from whet.interfaces.workers import Site
from whet.plan.plan import facts_of
from whet.plan.prepare import Prepared
from whet.plugins.endpoints import InstalledEndpoints
from whet.run import checkpoint
from whet.run.colocation import Turns
from whet.run.handles import BackendHandle, GeneratorHandle, TimedRollouts, busy, timed
from whet.run.inputs import evaluation_routes, make_scorers, open_chat, open_data, training_routes
from whet.run.interrupts import Interrupts
from whet.run.observers import Observers
from whet.run.recovery import Recovery
from whet.run.resume import Opened, nothing_left, open_run, own_fingerprint
from whet.run.run_folder import RunFolder
from whet.run.stall_monitor import StallMonitor
from whet.run.start_workers import Starting, lanes, make_slices
from whet.run.startup_time import Startup
from whet.run.weight_sync import WeightSync, make_probe
from whet.weights.transfer import MEETING

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from whet.data.batch import Batch
    from whet.data.chat import ChatTokenizer
    from whet.data.offline import OfflineData
    from whet.evaluation.evaluate import Evaluator
    from whet.interfaces.backend import Backend
    from whet.interfaces.workers import Slice
    from whet.rollout.recorder import Recorder
    from whet.rollout.routing import Route
    from whet.rollout.scorer import Scorer
    from whet.rollout.stream import RolloutStream
    from whet.run.checkpoint import Checkpoint
    from whet.run.steps import Steps
    from whet.runtime.event_loop import EpisodeLoop
    from whet.runtime.launcher import Cluster
    from whet.weights.probe import Probe


class Builder:
    """Builds the parts of a run. Adds a function to `closers` for each part that must be closed.

    The caller calls these functions in reverse order.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        closers: list[Callable[[], None]],
        observers: Observers | None = None,
        recovery: Recovery | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self.prepared, self.config, self.plan = prepared, prepared.config, prepared.plan
        self.folder, self.closers = folder, closers
        self.observers = observers or Observers(prepared.loaded.registry.manager, folder)
        self.recovery, self._interrupts = recovery, interrupts
        self.opened = False
        """Whether the run folder is known to belong to this run. The journal of another run must not be changed."""
        self.roles: dict[str, Backend] = {}
        """Further models that are started, by name."""
        self.asked = set[str]()
        """Names of the further models that environments use."""
        self.total = self.config.run.steps or 0
        """Number of steps of the whole run. For a run in epochs it is 0 until the data has been read."""
        self.spans = Spans()
        self._startup = Startup(time.time())
        self._turns = Turns((), self.spans, self._loop)
        self._episodes: EpisodeLoop | None = None
        self._cluster: Cluster | None = None
        self._endpoints = InstalledEndpoints(self.config.endpoint, prepared.loaded.registry)
        self._close_endpoint: Callable[[], None] = lambda: None

    def parts(self, again: bool = False) -> Parts:
        """Build and return all parts. Worker processes import while the driver prepares data and environments.

        `again`: this process has built the run before, and lost its workers.
        """
        config = self.config
        if not again:
            self.spans.add(self.prepared.spans)
            self._startup = Startup(self.prepared.spans[0].begin)
        cluster = self.cluster()
        self.closers.append(self._watch_stalls().close)
        with self.spans.phase("run", "prepare"):
            chat = self.chat()
            data = self._data(chat)
            environments = [
                self.training_routes(),
                self.evaluation_routes(),
            ]
            run = open_run(self.prepared, self.folder, data, environments[0], self.observers.status, again)
        self.opened, self.total, saved = True, run.total, run.saved
        if again:
            self.observers.rewind(saved.step if saved else -1)
        else:
            self._open_loggers(run.done)
        self._turns = Turns(self.plan.turns, self.spans, self._loop)
        self.closers.append(self._turns.close)
        built = self.handles(["backend", *config.roles, *(["generator"] if config.generator else [])], cluster)
        turn = self._turns.around("backend")
        trainer = BackendHandle(built["backend"], *turn)
        backend = BackendHandle(built["backend"], *turn, timed(self.spans))
        sampler = built.get("generator")
        generator = GeneratorHandle(
            sampler, *self._turns.requests(), busy(self.spans), receiving=self._turns.took_weights
        ) if sampler else None  # fmt: skip
        if self._cluster is not None:
            self.spans.add(self._cluster.preparations())
        if saved:
            with self.spans.phase("backend", "load"):
                for name, trained in self._saved(backend).items():
                    trained.load(saved.part(name))
        stream = self._stream(environments[0], generator, chat, saved)
        evaluate = self._evaluation(environments[1], generator, chat, stream)
        recorder = self._recorder(built["backend"], chat)
        probe = make_probe(self.prepared, trainer, sampler, chat, self._loop, self._turns.probing)
        steps = self._steps(run, self._saved(backend), stream, recorder, evaluate, probe, data)
        self.closers.append(steps.close)
        rollouts = TimedRollouts(
            stream, self.spans, steps.interruptible, lambda batch: recorder.taken(steps.done + 1, batch),
            self._turns.generation,
        ) if stream else None  # fmt: skip
        parts = Parts(
            config=config, algorithm=build_selection(config.algorithm), hooks=self.observers.hooks, backend=backend,
            roles=self.roles, generator=generator, chat=chat, loss=self._loss(), steps=steps, data=data,
            evaluate=evaluate, rollouts=rollouts, sync_weights=self._weight_sync(backend, generator, stream, probe),
            seed=config.run.seed,
        )  # fmt: skip
        parts.sync_weights(version=run.done)
        if self.config.endpoint.serve:
            self._serve(generator, chat, stream)
        return parts

    def refuse_another(self) -> None:
        """Raise `CheckpointError` if the run folder holds another run. Starts no role and writes nothing."""
        own_fingerprint(self.prepared, self.folder, self._data(self.chat()), self.training_routes())

    def nothing_left(self, done: int) -> bool:
        """Return whether no step is left after `done` steps. Data is read only if no checkpoint holds the answer."""
        return nothing_left(self.prepared, self.folder, done, lambda: self._data(self.chat()), self.observers.status)

    def _watch_stalls(self) -> StallMonitor:
        def episodes() -> list[str]:
            return [f"episodes: {', '.join(places)}"] if self._episodes and (places := self._episodes.where()) else []

        log, notice = self.folder.logs / "waits.log", self.config.cluster.deadlines.notice
        return StallMonitor(self.spans, log, notice, self._cluster, episodes)

    def chat(self, role: str = "backend") -> "ChatTokenizer":
        """Return the tokenizer of a role's model, with its chat template."""
        return open_chat(self.prepared, self.folder.began(), role)

    def _data(self, chat: "ChatTokenizer") -> "OfflineData | None":
        return open_data(self.prepared, chat, self.spans, self.observers.status)

    def training_routes(self) -> "list[Route]":
        """Return the environments of training."""
        return training_routes(self.prepared, self._scorers, self.closers)

    def evaluation_routes(self) -> "list[Route]":
        """Return the environments of `evaluation`."""
        return evaluation_routes(self.prepared, self._scorers, self.closers)

    def _scorers(self, names: Sequence[str]) -> "dict[str, Scorer]":
        self.asked.update(names)
        return make_scorers(self.prepared, names, self.roles, self.chat, self.closers)

    def _info(self, done: int = 0) -> RunInfo:
        folder = self.folder.path.resolve()
        return RunInfo(folder, folder.name, unstructure(self.config), self.total, done)

    def _open_loggers(self, done: int) -> None:
        info = self._info(done)
        for selection in self.config.loggers:
            self.observers.add(selection.name, build_selection(selection, info))

    def cluster(self, *only: str) -> "Callable[[str], Slice]":
        """Return a function from a role to its slice. It knows all roles, or only the named ones."""
        slices = make_slices(self.prepared, self.folder.logs, self.closers, only)
        self._cluster = slices.cluster
        return slices.of

    def _saved(self, backend: "Backend") -> "dict[str, Backend]":
        """Return the models that are saved in a checkpoint, by the names of their folders in it."""
        trained = {f"roles/{name}": handle for name, handle in self.roles.items() if self.prepared.roles[name].trained}
        return {"backend": backend, **trained}

    def handles(self, roles: Sequence[str], slice_of: "Callable[[str], Slice]") -> dict[str, Any]:
        """Start the workers of roles and return the driver's handles. Further models are then in `self.roles` as well.

        If several roles fail, the error of the first one is raised.
        """
        groups = [list(roles)] if self.plan.inline else lanes(map(self.plan.role, roles))
        starting = Starting(groups, lambda role: self._handle(role, slice_of))
        try:
            found = starting.result(roles)
        finally:
            self.closers += [handle.close for handle in starting.built()]
        further = [role for role in roles if role in self.config.roles]
        for role in further:
            self.roles[role] = BackendHandle(found[role], *self._turns.around(role), timed(self.spans, role))
        return found

    def _handle(self, role: str, slice_of: "Callable[[str], Slice]") -> Any:
        site = Site(
            slice=slice_of(role),
            model=self.prepared.models.get(role, self.prepared.model),
            run=self._info(),
            seed=self.config.run.seed,
            scratch=self.folder.scratch.resolve(),
            status=self.observers.status,
            # With another chat template or tokenizer, a text may have more tokens than it has for the policy.
            max_context=0 if role in self.asked else self.plan.max_context,
            trained=role in ("backend", "generator") or self.prepared.roles[role].trained,
            replacing=self.recovery if self.recovery and self.recovery.enabled else None,
        )
        self.observers.status(f"{role} to start")
        with self.spans.phase(role, "start"):
            handle = build_selection(self.prepared.roles[role].selection, site)
        self._turns.join(role, handle)
        return handle

    def _loss(self) -> Spec:
        chosen = getattr(self.config.algorithm.config, "loss", None)
        return to_spec(chosen) if isinstance(chosen, Selection) else Spec("")

    def _loop(self) -> "EpisodeLoop":
        """Return the one event loop on which all episodes are played."""
        from whet.runtime.event_loop import EpisodeLoop

        if self._episodes is None:
            self._episodes = EpisodeLoop()
            self.closers.append(self._episodes.close)
        return self._episodes

    def _stream(
        self, routes: "list[Route]", generator: Any, chat: "ChatTokenizer", saved: "Checkpoint | None"
    ) -> "RolloutStream | None":
        from whet.rollout.stream import RolloutStream

        if not routes:
            return None
        algorithm = self.config.algorithm
        filters = [build_selection(chosen) for chosen in getattr(algorithm.config, "filters", ())]
        stream = RolloutStream(
            routes, generator, chat, attrs.evolve(self.config.rollout, max_context=self.plan.max_context),
            group_size=facts_of(algorithm, self.prepared.model).group_size or 1, seed=self.config.run.seed,
            filters=filters, deadline_seconds=self.config.cluster.deadlines.episode,
            status=self.observers.status, loop=self._loop(), endpoints=self._endpoints,
            greedy=any(found.greedy_sample for found in self.prepared.facts.values()),
        )  # fmt: skip
        self.closers.append(stream.close)
        if saved:
            stream.restore(saved.state["rollouts"])
        return stream

    def evaluator(self, routes: "list[Route]", generator: Any, chat: "ChatTokenizer") -> "Evaluator":
        """Return the evaluator of these environments."""
        from whet.evaluation.evaluate import Evaluator

        return Evaluator(
            routes, generator, chat, self.config.evaluation, self.config.rollout, max_context=self.plan.max_context,
            seed=self.config.run.seed, deadline_seconds=self.config.cluster.deadlines.episode,
            status=self.observers.status, loop=self._loop(), endpoints=self._endpoints,
        )  # fmt: skip

    def _evaluation(
        self, routes: "list[Route]", generator: Any, chat: "ChatTokenizer", stream: "RolloutStream | None"
    ) -> Callable[[int], Metrics]:
        if not routes:
            return lambda step: {}
        evaluator = self.evaluator(routes, generator, chat)

        def evaluate(step: int) -> Metrics:
            if stream is not None and step >= self.total:
                stream.close()  # no step is left that could use its rollouts
            self._turns.generation()
            # No other requests meanwhile: batches, and so rounding errors, must not depend on timing.
            with self.spans.phase("run", "evaluate"), stream.paused() if stream else nullcontext():
                result = evaluator.evaluate()
            label = f"step-{step:06d}"
            for name, rows in result.rows(f"{label}-").items():
                self.folder.append(f"evaluations/{name}", rows)
            self.folder.write_json(f"evaluations/{label}.json", result.summary(f"{label}-", step=step))
            return result.metrics

        return evaluate

    def _serve(self, generator: Any, chat: "ChatTokenizer", stream: "RolloutStream | None") -> None:
        """Start the endpoint of the run, which serves the model from its first weights on."""
        from whet.rollout.gate import Gate

        self._turns.generation()  # requests before the first step need a generator that is awake
        self._close_endpoint = self._endpoints.serve(
            generator, chat, self.config.rollout, max_context=self.plan.max_context, seed=self.config.run.seed,
            gate=stream.gate if stream else Gate(), folder=self.folder, loop=self._loop(),
        )  # fmt: skip
        self.closers.append(self._close_endpoint)

    def _hang_up(self) -> None:
        """Close the endpoint if roles take turns: a save would wait for its requests in flight."""
        if self._turns.sides:
            try:
                self._close_endpoint()
            except Exception:  # a failure here must not prevent the checkpoint
                log.exception("the endpoint could not be closed")

    def _recorder(self, trainer: "Backend", chat: "ChatTokenizer") -> "Recorder":
        from whet.rollout.recorder import Recorder

        recording = timed(self.spans, names={"score": "record"})
        handle = BackendHandle(trainer, *self._turns.around("backend"), recording)

        def score(batch: "Batch") -> Any:
            return handle.score(batch, ("logprobs",))["logprobs"]

        given = facts_of(self.config.backend, self.prepared.model).outputs_given
        return Recorder(self.config.rollout.record, score if "logprobs" in given else None, chat.pieces)

    def _steps(
        self, run: Opened, trained: "Mapping[str, Backend]", stream: "RolloutStream | None", recorder: "Recorder",
        evaluate: Callable[[int], Metrics], probe: "Probe | None", data: "OfflineData | None",
    ) -> "Steps":  # fmt: skip
        from whet.run.steps import Sinks, Steps

        position = {"rollouts": stream.state() if stream else {}}
        size = self.prepared.facts["algorithm"].records_per_step
        carried = run.saved.state.get("algorithm", {}) if run.saved else {}

        def records(step: int, batch: "Batch") -> Mapping[str, Any]:
            if stream is None:
                return {}
            # Read here and not when saving: a signal may end the run after the stream has returned the next batch.
            position["rollouts"] = stream.state()
            consumed = stream.collect()
            rows = recorder.rows(consumed.trained, batch)
            self.folder.append_later(f"rollouts/step-{step:06d}.jsonl", rows)
            return consumed.entry()

        def save(step: int) -> None:
            if steps.stopped_by is not None:
                self._hang_up()
            state = {**position, "algorithm": steps.saved_state, "identity": run.fingerprint}
            if data is not None and size is not None:
                state["data"] = data.position(step, size)
            checkpoint.save_models(self.folder, step, state, trained, self.config.run.keep)

        def log(step: int, numbers: Mapping[str, float]) -> None:
            if self.recovery is not None:
                self.recovery.finished(step)
            self.observers.log(step, numbers)

        def gather() -> Metrics:
            return merge([stream.metrics() if stream else {}, probe.metrics() if probe else {}, self._turns.metrics()])

        sinks = Sinks(records, evaluate, log, save, gather)
        every = self.config.evaluation.every
        steps = Steps(
            self.folder, self.config.run, run.done, every, self.spans, sinks, self._startup, run.total, carried,
            self._interrupts,
        )  # fmt: skip
        return steps

    def _weight_sync(
        self, backend: "Backend", generator: Any, stream: "RolloutStream | None", probe: "Probe | None"
    ) -> Callable[..., None]:
        if generator is None:
            return lambda version: None
        spec, places = self._spec()
        sync = WeightSync(
            backend, generator, spec, self.spans, stream.set_version if stream else lambda version: None,
            self.config.rollout.on_weight_update, probe, places,
        )  # fmt: skip
        if self.recovery is not None:
            self.recovery.resync = sync.resync

        def sync_weights(*, version: int) -> None:
            self._turns.training()  # before `sync` takes its lock: requests may wait for a resync, which needs it too
            sync(version=version)

        return sync_weights

    def _spec(self) -> "tuple[TransferSpec, Callable[[], Places]]":
        """Return the spec that all weight syncs share, and a function that returns the last known places of senders."""
        way, seconds, recovery = self.plan.way, self.config.cluster.deadlines.weight_sync, self.config.cluster.recovery
        assert way is not None  # a run with a generator has one
        if way.transport not in MEETING:
            folder = str(self.folder.scratch.resolve() / "weights")
            return TransferSpec(way.transport, folder, "", 0, timeout_seconds=seconds), tuple
        from whet.weights.exchange import Exchange

        exchange = Exchange(self._cluster.address() if self._cluster else "127.0.0.1")
        self.closers.append(exchange.close)
        spec = TransferSpec(
            way.transport, exchange.address, "", 0, senders=way.senders, receivers=way.receivers,
            timeout_seconds=seconds, token=exchange.token, kept=recovery.enabled and recovery.replicas > 0,
        )  # fmt: skip
        return spec, exchange.places
