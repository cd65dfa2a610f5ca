"""The shorter jobs beside a run: evaluate a model, export a checkpoint."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from whet import checkpoint
from whet.builder import Builder
from whet.config.load import load_config
from whet.errors import CheckpointError, ConfigError, WhetError
from whet.parts import closing_all
from whet.prepare import Prepared, prepare
from whet.recovery import Recovery
from whet.rollout.judgement import EvaluationResult
from whet.rollout.paired import SUMMARY, Comparison, compare, read_written
from whet.run_folder import RunFolder, disk_errors, json_line

if TYPE_CHECKING:
    from whet.interfaces.backend import Backend
    from whet.interfaces.logger import Logger
    from whet.plugins import Registry


@frozen
class Evaluated:
    """The result of `whet eval`; as a string, a table."""

    model: str
    result: EvaluationResult
    comparison: Comparison | None = None

    def __str__(self) -> str:
        tables = [self.result.table(), *([self.comparison.table()] if self.comparison else [])]
        return f"{self.model}\n" + "\n\n".join(tables)

    def write(self, out: Path) -> None:
        """Write `evaluation.json`, and of each environment `NAME.jsonl`, its episodes, and `tasks/NAME.jsonl`."""
        summary = self.result.summary(model=self.model)
        if self.comparison:
            summary["comparison"] = self.comparison.summary()
        with disk_errors(out):
            (out / "tasks").mkdir(parents=True, exist_ok=True)
            for name, rows in self.result.rows().items():
                (out / name).write_text("".join(map(json_line, rows)), encoding="utf-8")
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
    prepared.refuse_elsewhere()
    config = prepared.config
    if not config.evaluation.environments:
        raise ConfigError(f"evaluation.environments: {path} lists none; there is nothing to evaluate on")
    other = read_written(against) if against else None
    with _workplace("eval") as folder, closing_all([]) as closers:
        builder = _builder(prepared, folder, closers)
        builder.recovery = Recovery(config.cluster.recovery, builder.folder)
        if progress is not None:
            builder.watchers.add("progress", progress)
        closers.append(builder.watchers.close)
        routes = builder.evaluation_routes()
        cluster = builder.cluster("generator", *builder.asked)
        generator = builder.handles(["generator", *builder.asked], cluster)["generator"]
        result = builder.evaluator(routes, generator, builder.chat()).evaluate()
    return Evaluated(prepared.model.path, result, compare(result, other) if other else None)


def export(run_folder: str | Path, out: str | Path, *, step: int | None = None) -> int:
    """Write a checkpoint of a run as a folder that `transformers` loads; give its step."""
    run = RunFolder(run_folder)
    if not (run.path / "config.yaml").is_file():
        raise CheckpointError(f"{run.path} is no run folder: it holds no config.yaml")
    if Path(out).exists() and not (Path(out).is_dir() and not any(Path(out).iterdir())):
        raise CheckpointError(f"{out} is no empty folder; choose another one for the model")
    if not any(run.checkpoints.glob("step-*")):
        raise CheckpointError(f"{run.path} holds no checkpoint yet; set run.save_every to save more often")
    prepared = prepare(run.path / "config.yaml", _alone(run.path / "config.yaml"), config_only=False, trains=False)
    with _workplace("export") as folder, closing_all([]) as closers:
        builder = _builder(prepared, folder, closers)
        backend = builder.handles(["backend"], builder.cluster("backend"))["backend"]
        written = _load(backend, run, step)
        with disk_errors(Path(out)):
            Path(out).mkdir(parents=True, exist_ok=True)
        backend.export(Path(out))
    return written


def _alone(config: Path) -> list[str]:
    """Change a config so that its backend runs as one worker: in this process, unless it has a Python of its own."""
    python = load_config(config).config.cluster.python.get("backend")
    return [
        f"cluster.python={json.dumps({'backend': python} if python else {})}", "cluster.share=[]",
        f"cluster.workers={'process' if python else 'inline'}", "cluster.launcher=local", 'cluster.address=""',
        "cluster.placement={}", "cluster.resources={}", "cluster.ranks={}", "cluster.gpus={}",
        "cluster.sleep=never",
    ]  # fmt: skip


def _load(backend: "Backend", run: RunFolder, step: int | None) -> int:
    """Load a checkpoint and give its step.

    Of a run that goes on meanwhile, the newest may be another one the next moment.
    """
    for attempt in range(_ATTEMPTS):
        newest = max(run.checkpoints.glob("step-??????"), default=run.checkpoints)
        try:
            saved = checkpoint.latest(run, step)
            if saved is not None:
                backend.load(saved.part("backend"))
                return saved.step
        except WhetError:
            if newest.exists() or step is not None or attempt + 1 == _ATTEMPTS:
                raise
    raise CheckpointError(f"{run.path} holds no checkpoint any more")


_ATTEMPTS = 5


@contextmanager
def _workplace(job: str) -> Iterator[RunFolder]:
    """Give a job a folder of its own. After an error, which names them, the logs of its workers stay there."""
    folder = RunFolder(tempfile.mkdtemp(prefix=f"whet-{job}-"))
    try:
        yield folder
    except Exception:
        shutil.rmtree(folder.scratch, ignore_errors=True)
        if not any(log.stat().st_size for log in folder.logs.glob("*.log")):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    shutil.rmtree(folder.path, ignore_errors=True)


def _builder(prepared: Prepared, folder: RunFolder, closers: list[Callable[[], None]]) -> Builder:
    folder.scratch.mkdir(parents=True)
    return Builder(prepared, folder, closers)
