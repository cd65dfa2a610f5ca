"""Build the parts of a run from its plan, and run it.

load YAML -> structure -> problems -> plan -> slices -> parts -> run -> close in reverse order
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from whet import checkpoint
from whet.cluster.slices import Site
from whet.component import Problem, Selection, Spec
from whet.config.build import build_selection, to_spec
from whet.config.document import to_text
from whet.config.load import Loaded, load_config
from whet.config.structure import unstructure
from whet.errors import CheckpointError, ConfigError, DataError, PluginError, WhetError, in_words
from whet.identity import identity_of, versions
from whet.interfaces.logger import RunInfo
from whet.metrics import Metrics
from whet.model import ModelInfo, check_weights, locate, read_model
from whet.parts import Parts, Refit, TimedBackend, TimedGenerator, TimedRollouts, closing_all
from whet.plan import Machine, Plan, facts_of, gather_facts, make_plan, share_groups
from whet.run_folder import RunFolder, disk_errors, read_rows
from whet.spans import Spans
from whet.watchers import Watchers

if TYPE_CHECKING:
    from whet.checkpoint import Checkpoint
    from whet.cluster.slices import Slice
    from whet.config.sections import Config, EnvironmentSection
    from whet.data.batch import Batch
    from whet.data.chat import ChatTokenizer
    from whet.data.offline import OfflineData
    from whet.interfaces.backend import Backend
    from whet.rollout.evaluate import Evaluator
    from whet.rollout.loop import EpisodeLoop
    from whet.rollout.routing import Route
    from whet.rollout.stream import RolloutStream
    from whet.steps import Steps


@frozen
class Prepared:
    """A config with its plan; nothing has been claimed."""

    loaded: Loaded
    model: ModelInfo
    plan: Plan

    @property
    def config(self) -> "Config":
        """The structured config."""
        return self.loaded.config


@frozen
class Outcome:
    """How a run ended."""

    folder: Path
    steps: int
    """Steps finished in all."""
    finished: bool
    stopped_by: int | None = None
    """The signal that ended it early."""


def prepare(
    path: str | Path, overrides: Sequence[str] = (), *, config_only: bool = True, trains: bool = True
) -> Prepared:
    """Go as far as anyone can without resources: structure, problems, plan. Imports no torch.

    `config_only` leaves weights that are on the hub there; without `trains` the data files need not be here.
    """
    loaded = load_config(path, overrides)
    section = loaded.config.model
    folder = locate(section.path, section.revision, config_only=config_only, code=section.trust_remote_code)
    model = read_model(folder, section.dtype, section.trust_remote_code)
    if not config_only:
        check_weights(folder)
    plan, problems = make_plan(loaded.config, model, gather_facts(loaded.config, model), machine())
    if trains:
        problems += missing_files(loaded.config)
    if plan is None or problems:
        raise ConfigError([str(problem) for problem in problems])
    return Prepared(loaded, model, plan)


def missing_files(config: "Config") -> list[Problem]:
    """Look for the data files that a config names; what is on the hub is left to the run."""
    from whet.data.readers import find_file

    problems = []
    for name, files in (("train", config.data.train), ("validation", config.data.validation)) if config.data else ():
        for i, file in enumerate(files):
            try:
                found = find_file(file)
                message = "" if found is None or found.is_file() else f"there is no file {file.path!r}"
            except DataError as error:
                message = str(error)
            if message:
                problems.append(Problem(f"data.{name}.{i}.path", message))
    return problems


def machine() -> Machine:
    """Look at this machine without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = Path("/proc/driver/nvidia/gpus")
    gpus = len(list(driver.iterdir())) if driver.is_dir() else len(list(Path("/dev").glob("nvidia[0-9]*")))
    if visible is not None:
        gpus = min(gpus, len([name for name in visible.split(",") if name.strip()]))
    return Machine(len(os.sched_getaffinity(0)), gpus)


def run(path: str | Path, overrides: Sequence[str] = ()) -> Outcome:
    """Run a config from beginning, or from its last checkpoint, to the end."""
    from whet.steps import Interrupted

    with open(path, *overrides) as parts:
        config, steps = parts.config, parts.steps
        folder = Path(config.run.folder)
        if steps.done < config.run.steps:
            if steps.done == 0 and config.evaluation.at_start and config.evaluation.environments:
                steps.record(0, parts.evaluate(0))
            try:
                parts.hooks.whet_run(algorithm=parts.algorithm, parts=parts)
            except Interrupted:
                steps.save_now()
        finished = steps.done >= config.run.steps
        if finished and config.run.export:
            _export(parts.backend, RunFolder(folder), steps.done)
        return Outcome(folder, steps.done, finished, steps.stopped_by)


def _export(backend: "Backend", folder: RunFolder, step: int) -> None:
    """Write the final model whole, once; a sitting that failed to leaves it to the next."""
    target, partial = folder.path / "model", folder.path / "model.partial"
    journal = [row.get("event") for row in read_rows(folder.path / "journal.jsonl")]
    if target.is_dir() and [event for event in journal if event in ("step", "exported")][-1:] == ["exported"]:
        return
    shutil.rmtree(partial, ignore_errors=True)
    backend.export(partial)
    with disk_errors(target):
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    folder.journal("exported", step=step)


@contextmanager
def open(path: str | Path, *overrides: str) -> Iterator[Parts]:
    """Open a run as a library: `with whet.open("it.yaml", "algorithm.group_size=4") as parts:`."""
    prepared = prepare(path, overrides, config_only=False)
    folder = RunFolder(prepared.config.run.folder)
    with closing_all([]) as closers:
        folder.claim()
        closers += [folder.release, lambda: shutil.rmtree(folder.scratch, ignore_errors=True)]
        builder = Builder(prepared, folder, closers)
        try:
            yield builder.parts()
        except BaseException as error:
            builder.watchers.failed = True
            if builder.opened:
                with suppress(WhetError):  # a full disk must not hide what failed
                    folder.journal("failed", error=type(error).__name__, message=str(error)[:2000])
            raise
        folder.journal("closed")


class Builder:
    """Builds parts in the order in which they need each other; what it starts is closed in reverse."""

    def __init__(self, prepared: Prepared, folder: RunFolder, closers: list[Callable[[], None]]) -> None:
        self.prepared, self.config, self.plan = prepared, prepared.config, prepared.plan
        self.folder, self.closers = folder, closers
        self.opened = False
        """Whether the run folder is known to be this run's; another run's journal is left alone."""
        self.spans = Spans()
        self._episodes: EpisodeLoop | None = None
        self.watchers = Watchers(self.prepared.loaded.registry.manager, folder)

    def parts(self) -> Parts:
        """Build everything. Worker processes start to import while the driver prepares data and environments."""
        config = self.config
        cluster = self.cluster()
        chat = self.chat()
        data = self._data(chat)
        environments = [
            self.routes(config.environments, "train"),
            self.routes(config.evaluation.environments, "test"),
        ]
        saved = self._resume(data, environments[0])
        done = saved.step if saved else 0
        self._open_loggers(done)
        backend: Backend = TimedBackend(self.handle("backend", cluster), self.spans)
        generator = TimedGenerator(self.handle("generator", cluster), self.spans) if config.generator else None
        if saved:
            backend.load(saved.backend)
        stream = self._stream(environments[0], generator, chat, saved)
        evaluate = self._evaluation(environments[1], generator, chat)
        steps = self._steps(backend, stream, evaluate, done)
        parts = Parts(
            config=config, algorithm=build_selection(config.algorithm), hooks=self.watchers.hooks, backend=backend,
            generator=generator, chat=chat, loss=self._loss(), steps=steps, data=data, evaluate=evaluate,
            rollouts=TimedRollouts(stream, self.spans, steps.interruptible) if stream else None,
            refit=self._refit(backend, generator, stream), seed=config.run.seed,
        )  # fmt: skip
        parts.refit(version=done)
        return parts

    def chat(self) -> "ChatTokenizer":
        """Give the tokenizer with its chat template."""
        from whet.data.chat import ChatTokenizer

        chat = ChatTokenizer(self.prepared.model.path, self.config.model.chat_template, now=self.folder.began())
        if self.config.environments or self.config.evaluation.environments:
            _ = chat.template  # one that is missing or cannot be read would fail every episode
        return chat

    def _data(self, chat: "ChatTokenizer") -> "OfflineData | None":
        from whet.data.offline import OfflineData

        if self.config.data is None:
            return None
        limit = self.config.data.max_length or self.prepared.model.max_positions
        return OfflineData(self.config.data, chat, self.config.run.seed, limit, self.watchers.status)

    def routes(self, entries: "Sequence[EnvironmentSection]", split: str) -> "list[Route]":
        """Build the environments of a section."""
        from whet.rollout.routing import Route

        routes = []
        for entry in entries:
            name, chosen = entry.name or entry.component.name, entry.split or split
            with _environment_errors(name, chosen):
                environment = build_selection(entry.component)
                self.closers.append(environment.close)
                route = Route(name, environment, chosen, entry.weight, samples=entry.samples, limit=entry.limit)
                route.tasks()
            routes.append(route)
        return routes

    def _resume(self, data: "OfflineData | None", routes: "list[Route]") -> "Checkpoint | None":
        config, folder = self.config, self.folder
        identity = identity_of(config, self.prepared.model, data, routes)
        before = folder.read_json("identity.json") if folder.has_steps() else None
        if before is not None and config.run.resume == "never":
            raise CheckpointError(f"{folder.path} holds a run already; choose another run.folder, or run.resume: auto")
        if before is None and config.run.resume == "must":
            raise CheckpointError(f"run.resume is `must`, but {folder.path} holds no run")
        if before is not None:
            self._refuse_another(f"{folder.path} holds", before, identity)
        saved = checkpoint.latest(folder)
        if saved:
            self._refuse_another(f"{saved.folder} was saved by", saved.state.get("identity"), identity)
        folder.rewind(saved.step if saved else -1)
        shutil.rmtree(folder.scratch, ignore_errors=True)
        folder.scratch.mkdir(parents=True, exist_ok=True)
        folder.write_text("config.yaml", to_text(unstructure(config)))
        folder.write_json("identity.json", identity)
        folder.write_json("versions.json", versions())
        folder.write_json("plan.json", self.plan.to_dict())
        folder.journal("opened", after_step=saved.step if saved else 0, process=os.getpid())
        self.opened = True
        return saved

    def _refuse_another(self, found: str, before: Any, identity: dict[str, Any]) -> None:
        different = checkpoint.differences(before, identity, self.config.run.allow_changed)
        if different:
            raise CheckpointError(
                f"{found} another run; choose another run.folder, or list what may differ in run.allow_changed:\n"
                + "\n".join(f"  {line}" for line in different)
            )

    def _info(self, done: int = 0) -> RunInfo:
        folder = self.folder.path.resolve()
        return RunInfo(folder, folder.name, unstructure(self.config), self.config.run.steps, done)

    def _open_loggers(self, done: int) -> None:
        info = self._info(done)
        self.closers.append(self.watchers.close)
        for selection in self.config.loggers:
            self.watchers.add(selection.name, build_selection(selection, info))

    def cluster(self) -> "Callable[[str], Slice]":
        """Give a function from roles to slices."""
        deadlines = self.config.cluster.deadlines
        if self.plan.inline:
            from whet.cluster.inline import InlineSlice

            places = {place.role: place for place in self.plan.roles}
            return lambda role: InlineSlice(role, threads=places[role].threads, device=places[role].devices[0])
        from whet.cluster.local import LocalCluster

        cluster = LocalCluster(self.folder.logs, deadlines, share=share_groups(self.config))
        self.closers.append(cluster.close)
        slices = {r.role: cluster.slice(r.role, r.ranks, r.threads, r.devices) for r in self.plan.roles}
        cluster.warm(slices.values(), self.plan.imports)
        return slices.__getitem__

    def handle(self, role: str, slice_of: "Callable[[str], Slice]") -> Any:
        """Build the driver's handle of a role, which starts its workers."""
        site = Site(
            slice=slice_of(role),
            model=self.prepared.model,
            run=self._info(),
            seed=self.config.run.seed,
            scratch=self.folder.scratch.resolve(),
            status=self.watchers.status,
            max_context=self.plan.max_context,
        )
        self.watchers.status(f"{role} to start")
        with self.spans.phase(role, "start"):
            handle = build_selection(getattr(self.config, role), site)
        self.closers.append(handle.close)
        return handle

    def _loss(self) -> Spec:
        chosen = getattr(self.config.algorithm.config, "loss", None)
        return to_spec(chosen) if isinstance(chosen, Selection) else Spec("")

    def _loop(self) -> "EpisodeLoop":
        """Give the one event loop on which all episodes are played."""
        from whet.rollout.loop import EpisodeLoop

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
            status=self.watchers.status, loop=self._loop(),
        )  # fmt: skip
        self.closers.append(stream.close)
        if saved:
            stream.restore(saved.state["rollouts"])
        return stream

    def evaluator(self, routes: "list[Route]", generator: Any, chat: "ChatTokenizer") -> "Evaluator":
        """Build what evaluates."""
        from whet.rollout.evaluate import Evaluator

        return Evaluator(
            routes, generator, chat, self.config.evaluation, self.config.rollout, max_context=self.plan.max_context,
            seed=self.config.run.seed, deadline_seconds=self.config.cluster.deadlines.episode,
            status=self.watchers.status, loop=self._loop(),
        )  # fmt: skip

    def _evaluation(self, routes: "list[Route]", generator: Any, chat: "ChatTokenizer") -> Callable[[int], Metrics]:
        if not routes:
            return lambda step: {}
        evaluator = self.evaluator(routes, generator, chat)

        def evaluate(step: int) -> Metrics:
            with self.spans.phase("run", "evaluate"):
                result = evaluator.evaluate()
            for name, records in result.records.items():
                self.folder.append(f"evaluations/step-{step:06d}-{name}.jsonl", records)
            return result.metrics

        return evaluate

    def _steps(
        self, backend: "Backend", stream: "RolloutStream | None", evaluate: Callable[[int], Metrics], done: int
    ) -> "Steps":
        from whet.rollout.collate import record
        from whet.steps import Sinks, Steps

        identity = self.folder.read_json("identity.json")
        position = {"rollouts": stream.state() if stream else {}}

        def records(step: int, batch: "Batch") -> None:
            if stream is not None:
                # Here, not when saving: a signal may end the run after the next batch was handed over.
                position["rollouts"] = stream.state()
                rows = [row for group in stream.last_groups for row in record(group)]
                self.folder.append(f"rollouts/step-{step:06d}.jsonl", rows)

        def save(step: int) -> None:
            state = {**position, "identity": identity}
            checkpoint.write(self.folder, step, state, lambda folder: backend.save(folder).result())
            checkpoint.prune(self.folder, self.config.run.keep)
            self.folder.journal("saved", step=step)

        sinks = Sinks(records, evaluate, self.watchers.log, save, stream.metrics if stream else dict)
        return Steps(self.folder, self.config.run, done, self.config.evaluation.every, self.spans, sinks)

    def _refit(self, backend: "Backend", generator: Any, stream: "RolloutStream | None") -> Callable[..., None]:
        if generator is None:
            return lambda version: None
        return Refit(
            backend, generator, self.plan.transport, str(self.folder.scratch.resolve() / "weights"), "",
            self.config.cluster.deadlines.refit, self.spans, stream.set_version if stream else lambda version: None,
        )  # fmt: skip


@contextmanager
def _environment_errors(name: str, split: str) -> Iterator[None]:
    """Say which environment could not be built, whatever its code raised."""
    try:
        yield
    except WhetError as error:
        raise ConfigError(f"environment {name!r}, split {split!r}: {error}") from error
    except Exception as error:  # an environment's own code
        raise PluginError(f"environment {name!r} cannot be built: {in_words(error)}") from error
