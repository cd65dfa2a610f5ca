"""The shorter jobs beside a run: evaluate a model, export a checkpoint."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from whet import checkpoint
from whet.builder import Builder
from whet.errors import CheckpointError, ConfigError, WhetError
from whet.metrics import plain
from whet.parts import closing_all
from whet.prepare import Prepared, prepare
from whet.recovery import Recovery
from whet.rollout.evaluate import EvaluationResult
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

    def __str__(self) -> str:
        lines = [f"{self.model}"]
        for env in self.result.environments:
            interval = "" if env.interval is None else f" +- {env.interval:.4f}"
            rewards = ", ".join(f"{name} {value:.4f}" for name, value in env.rewards.items())
            dropped = f", {env.dropped} dropped" if env.dropped else ""
            lines.append(
                f"  {env.name}: reward {env.reward:.4f}{interval} over {env.tasks} tasks ({env.episodes} episodes"
                f"{dropped}); {rewards}; {env.response_length:.1f} tokens an answer"
            )
        return "\n".join(lines)

    def write(self, out: Path) -> None:
        """Write `metrics.json` and a file of records for each environment."""
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / "metrics.json").write_text(json.dumps(plain(self.result.metrics), indent=2), encoding="utf-8")
            for name, records in self.result.records.items():
                (out / f"{name}.jsonl").write_text("".join(map(json_line, records)), encoding="utf-8")


def evaluate(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    registry: "Registry | None" = None,
    progress: "Logger | None" = None,
) -> Evaluated:
    """Evaluate a model on what a config has under `evaluation`; nothing is trained and no run folder is touched.

    The generator loads the model itself, so no backend is started. A replica that is lost is replaced, as often as
    `cluster.recovery` allows. `progress` is told what is waited for.
    """
    chosen = [f"model.path={json.dumps(str(model))}"] if model else []
    prepared = prepare(path, [*overrides, *chosen], config_only=False, trains=False, registry=registry)
    config = prepared.config
    if not config.evaluation.environments:
        raise ConfigError(f"evaluation.environments: {path} lists none; there is nothing to evaluate on")
    with tempfile.TemporaryDirectory(prefix="whet-eval-") as scratch, closing_all([]) as closers:
        builder = _builder(prepared, scratch, closers)
        builder.recovery = Recovery(config.cluster.recovery, builder.folder)
        if progress is not None:
            builder.watchers.add("progress", progress)
        closers.append(builder.watchers.close)
        routes = builder.routes(config.evaluation.environments, "test")
        generator = builder.handle("generator", builder.cluster("generator"))
        return Evaluated(prepared.model.path, builder.evaluator(routes, generator, builder.chat()).evaluate())


def export(run_folder: str | Path, out: str | Path, *, step: int | None = None) -> None:
    """Write a checkpoint of a run as a folder that `transformers` loads."""
    run = RunFolder(run_folder)
    if not (run.path / "config.yaml").is_file():
        raise CheckpointError(f"{run.path} is no run folder: it holds no config.yaml")
    if Path(out).exists() and not (Path(out).is_dir() and not any(Path(out).iterdir())):
        raise CheckpointError(f"{out} is no empty folder; choose another one for the model")
    if not any(run.checkpoints.glob("step-*")):
        raise CheckpointError(f"{run.path} holds no checkpoint yet; set run.save_every to save more often")
    alone = ["cluster.launcher=local", "cluster.workers=inline", "cluster.ranks={}", "cluster.gpus={}"]
    prepared = prepare(run.path / "config.yaml", alone, config_only=False, trains=False)
    with tempfile.TemporaryDirectory(prefix="whet-export-") as scratch, closing_all([]) as closers:
        builder = _builder(prepared, scratch, closers)
        backend = builder.handle("backend", builder.cluster())
        _load(backend, run, step)
        with disk_errors(Path(out)):
            Path(out).mkdir(parents=True, exist_ok=True)
        backend.export(Path(out))


def _load(backend: "Backend", run: RunFolder, step: int | None) -> None:
    """Load a checkpoint; of a run that goes on meanwhile, the newest may be another one the next moment."""
    for attempt in range(_ATTEMPTS):
        newest = max(run.checkpoints.glob("step-??????"), default=run.checkpoints)
        try:
            saved = checkpoint.latest(run, step)
            if saved is not None:
                backend.load(saved.backend)
                return
        except WhetError:
            if newest.exists() or step is not None or attempt + 1 == _ATTEMPTS:
                raise
    raise CheckpointError(f"{run.path} holds no checkpoint any more")


_ATTEMPTS = 5


def _builder(prepared: Prepared, scratch: str, closers: list[Callable[[], None]]) -> Builder:
    folder = RunFolder(scratch)
    folder.scratch.mkdir(parents=True)
    return Builder(prepared, folder, closers)
