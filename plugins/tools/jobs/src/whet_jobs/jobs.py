"""The shorter jobs beside a run: evaluate a model, export a checkpoint."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from whet.config.renamed import renewed
from whet.config.structure import unstructure
from whet.data.files import disk_errors, json_line, private
from whet.data.model_info import fingerprint
from whet.errors import CheckpointError, ConfigError, WhetError
from whet.evaluation.result import EvaluationResult
from whet.interfaces.logger import RunInfo
from whet.plan.load import load_config
from whet.plan.prepare import Prepared, prepare
from whet.plugins.endpoints import InstalledEndpoints
from whet.run import checkpoint
from whet.run.inputs import make_evaluator, read_inputs
from whet.run.interrupts import Interrupts
from whet.run.models import Attempt, start
from whet.run.observers import Observers
from whet.run.recovery import Recovery
from whet.run.resume import differences
from whet.run.run_folder import RunFolder, closing_all, temporary_run_folder
from whet.run.start_workers import make_worker_groups
from whet_jobs.comparison import SUMMARY, Comparison, compare, read_written
from whet_jobs.tables import table
from whet_training.whole import refuse_used, whole

if TYPE_CHECKING:
    from whet.config.sections import Config
    from whet.interfaces.backend import Backend
    from whet.interfaces.logger import Logger
    from whet.plugins.registry import Registry


@frozen
class Evaluated:
    """The result of `whet eval`; as a string, a table."""

    model: str
    result: EvaluationResult
    comparison: Comparison | None = None

    def __str__(self) -> str:
        tables = [table(self.result), *([self.comparison.table()] if self.comparison else [])]
        return f"{self.model}\n" + "\n\n".join(tables)

    def write(self, out: Path) -> None:
        """Write `evaluation.json`, and of each environment `NAME.jsonl`, its episodes, and `tasks/NAME.jsonl`."""
        summary = self.result.summary(model=self.model)
        if self.comparison:
            summary["comparison"] = self.comparison.summary()
        with disk_errors(out):
            (out / "tasks").mkdir(parents=True, exist_ok=True)
            for name, rows in self.result.rows().items():
                with open(out / name, "w", encoding="utf-8", opener=private) as stream:
                    stream.writelines(map(json_line, rows))
            (out / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def evaluate(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    against: Path | None = None,
    registry: "Registry | None" = None,
    progress: "Logger | None" = None,
) -> Evaluated:
    """Evaluate a model on what a config has under `evaluation`; nothing is trained and no run folder is touched.

    The generator loads the model itself, so no backend is started. A replica that is lost is replaced, as often as
    `cluster.recovery` allows. Where it fails, what the workers logged stays in the folder that the error names.
    `against` is an evaluation that was written before, to be compared with task by task.
    `progress` is told what is waited for.
    """
    chosen = [f"model.path={json.dumps(str(model))}"] if model else []
    prepared = prepare(path, [*overrides, *chosen], config_only=False, trains=False, registry=registry)
    config = prepared.config
    if not config.evaluation.environments:
        raise ConfigError(f"evaluation.environments: {path} lists none; there is nothing to evaluate on")
    begins_with = prepared.roles.backend.begins_with
    if begins_with and model is None:
        raise ConfigError(
            f"backend.{begins_with}: a run begins with it, and whet eval starts no backend, so it would evaluate "
            f"{prepared.model.path} without it; merge it into a model folder and pass that folder by --model, or pass "
            "the model of a run"
        )
    other = read_written(against) if against else None
    with _job("eval", prepared) as attempt:
        if progress is not None:
            attempt.observers.add("progress", progress)
        roles = ["generator", *prepared.roles.asked_by("evaluation.environments")]
        prepared.refuse_elsewhere(*roles)
        status, folder = attempt.observers.status, attempt.folder
        inputs = read_inputs(prepared, folder, attempt.roles, attempt.spans, status, attempt.closers, training=False)
        generator = _start(prepared, attempt, roles)["generator"]
        endpoints = InstalledEndpoints(config.endpoint, prepared.loaded.registry, prepared.roles.extras)
        result = make_evaluator(prepared, inputs.evaluation, generator, inputs.chat, status, endpoints)()
    return Evaluated(prepared.model.path, result, compare(result, other) if other else None)


def export(
    run_folder: str | Path, out: str | Path, *, step: int | Literal["best"] | None = None, overrides: Sequence[str] = ()
) -> int:  # fmt: skip
    """Write a checkpoint of a run, whose config `overrides` change, as a folder that `transformers` loads. Return its
    step.

    `step`: by default the last one; `best`: the best by `run.keep_best` of the run's config.
    """
    run = RunFolder(run_folder)
    if not (run.path / "config.yaml").is_file():
        raise CheckpointError(f"{run.path} is no run folder: it holds no config.yaml")
    refuse_used(Path(out))
    changes = [*overrides, *_alone(run.path / "config.yaml")]
    prepared = prepare(run.path / "config.yaml", changes, config_only=False, trains=False)
    if step == "best":
        step = _best(run, prepared.config)
    saved = exported(run, step, prepared.config)
    before, now = saved.state.get("identity", {}).get("model files"), fingerprint(prepared.model.path)
    if before and (other := checkpoint.differences({"model files": before}, {"model files": now}, [])):
        lines = "\n  ".join(other)
        raise CheckpointError(f"model.path: {prepared.model.path} is not the model that the run trained:\n  {lines}")
    with _job("export", prepared) as attempt, whole(Path(out).absolute()) as partial:
        backend = _start(prepared, attempt, ["backend"])["backend"]
        written = _load(backend, run, step, saved, prepared.config)
        backend.export(partial)
    return written


def _best(run: RunFolder, config: "Config") -> int:
    """Return the step of the best checkpoint. Raises `CheckpointError` where the run has none."""
    if (best := config.run.keep_best) is None:
        raise CheckpointError(f"{run.path / 'config.yaml'} has no run.keep_best, which says what is best; give a step")
    if not (steps := checkpoint.ranking(run, best)):
        raise CheckpointError(f"no checkpoint of {run.path} has the metric {best.metric!r} of run.keep_best")
    return steps[0]


def exported(run: RunFolder, step: int | None, config: "Config | None" = None) -> checkpoint.Checkpoint:
    """Return the checkpoint to export: that of a step, or the last that the run saved.

    It may differ from the run as `differences` of `run.resume` allows. Raises `CheckpointError` where that one cannot
    be used: an older one is taken only by its step.
    """
    try:
        saved = checkpoint.latest(run) if step is None else _of_step(run, step)
        last = last_saved(run)
        if saved is None or (step is None and saved.step < last):
            raise CheckpointError(
                f"{run.path} lacks the checkpoint of step {last}, which its journal says was saved last"
                if last else f"{run.path} holds no checkpoint yet; set run.save_every to save more often"
            )  # fmt: skip
    except CheckpointError as error:
        if step is not None:
            raise
        older = list[str]()
        for number, folder in checkpoint.folders(run):
            with suppress(CheckpointError):
                checkpoint.read(folder)
                older.append(f"--step {number}")
        how = f"; to export an older checkpoint, give {' or '.join(older)}" if older else ""
        raise CheckpointError(f"{error}\nnothing was exported{how}") from error
    own = saved.state.get("identity", {})
    different = differences(own, renewed(run.read_json("identity.json") or own, config), config)
    if different:
        lines = "\n".join(f"  {line}" for line in different)
        raise CheckpointError(f"{saved.folder} was saved by another run than that of {run.path}:\n{lines}")
    return saved


def _of_step(run: RunFolder, step: int) -> checkpoint.Checkpoint:
    """Return the checkpoint of a step. Raises `CheckpointError` if there is none, or if it is damaged."""
    folders = dict(checkpoint.folders(run))
    if step not in folders:
        have = ", ".join(map(str, folders)) or "none"
        raise CheckpointError(f"{run.path} has no checkpoint of step {step}; it has {have}")
    return checkpoint.read(folders[step])


def last_saved(run: RunFolder) -> int:
    """Return the step of the last checkpoint that counts by the run's journal; 0 if there is none."""
    saved = [0]
    for row in run.events():
        step = row.get("after_step") if row.get("event") == "rewound" else row.get("step")
        if not isinstance(step, int):
            continue
        if row.get("event") == "rewound":
            saved = [number for number in saved if number <= step]
        elif row.get("event") == "saved":
            saved.append(step)
    return saved[-1] if saved else 0


def _alone(config: Path) -> list[str]:
    """Change a config so that its backend runs as one worker: in this process, unless it has a Python of its own."""
    loaded = load_config(config).config
    python = loaded.cluster.python.get("backend")
    shared = hasattr(loaded.backend.config, "parallel")  # then it would ask for as many ranks
    return [
        *["backend.parallel={}"] * shared,
        f"cluster.python={json.dumps({'backend': python} if python else {})}", "cluster.colocate=[]",
        f"cluster.workers={'process' if python else 'inline'}", "cluster.launcher=local", 'cluster.address=""',
        "cluster.placement={}", "cluster.resources={}", "cluster.ranks={}", "cluster.gpus={}",
        "cluster.offload=never", "cluster.memory=ignore",
    ]  # fmt: skip


def _load(
    backend: "Backend", run: RunFolder, step: int | None, saved: checkpoint.Checkpoint, config: "Config | None" = None
) -> int:
    """Load a checkpoint that has been read, and return its step.

    A run that goes on meanwhile may delete the checkpoint at any moment. The newest one is loaded in its place then.
    """
    for _ in range(_RETRIES):
        try:
            backend.load(saved.part("backend"))
            return saved.step
        except WhetError:
            if saved.folder.exists() or step is not None:
                raise
            saved = exported(run, step, config)
    backend.load(saved.part("backend"))
    return saved.step


_RETRIES = 4


@contextmanager
def _job(name: str, prepared: Prepared) -> Iterator[Attempt]:
    """Open what a job shares with a run: a folder of its own, loggers, closers. Ctrl-C ends the job."""
    with (
        Interrupts("job").listening() as interrupts,
        temporary_run_folder(name) as folder,
        closing_all([]) as closers,
        interrupts.then_closing(),
    ):
        observers = Observers(prepared.loaded.registry.manager, folder)
        closers.append(observers.close)
        yield Attempt(folder, observers, closers, Recovery(prepared.config.cluster.recovery, folder))


def _start(prepared: Prepared, attempt: Attempt, roles: Sequence[str]) -> dict[str, Any]:
    """Start the workers of roles, and return what their components built."""
    config, folder = prepared.config, attempt.folder
    places = [prepared.plan.role(role) for role in roles]
    name = Path(config.run.folder).name
    worker_groups = make_worker_groups(config.cluster, name, places, prepared.roles, folder.logs, attempt.closers)
    info = RunInfo(folder.path.resolve(), folder.path.name, unstructure(config))
    return start(prepared, attempt, roles, worker_groups.of, info)
