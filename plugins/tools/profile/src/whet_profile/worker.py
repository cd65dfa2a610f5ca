"""The part of the profiler that is in a worker process. Needs torch.

call of the driver -> Tracer -> batch of a chosen step?   no: the worker's method
                                                         yes: the worker's method inside of torch.profiler
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from whet.component import resolve
from whet.data.batch import Batch
from whet.interfaces.workers import WorkerRank
from whet_profile.config import ProfileConfig


def traced(rank: WorkerRank, target: str, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Return the worker of a rank, inside of a tracer if the rank is chosen."""
    worker = resolve(target)(rank=rank, **arguments)
    config = ProfileConfig(**{name: value for name, value in settings.items() if name != "folder"})
    chosen = not config.ranks or rank.rank in config.ranks
    return Tracer(worker, rank, config, Path(settings["folder"])) if chosen else worker


class Tracer:
    """A worker whose calls with a batch of a chosen step are traced. All else is the worker's."""

    def __init__(self, worker: Any, rank: WorkerRank, config: ProfileConfig, folder: Path) -> None:
        self._worker, self._config = worker, config
        self._folder, self._who, self._gpu = folder, f"{rank.role}-{rank.rank}", rank.device.startswith("cuda")
        self._calls: Counter[tuple[int, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)
        if not inspect.ismethod(method) or inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            return method
        return lambda *args: self._call(name, method, args)

    def _call(self, name: str, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        step = next((arg.info.get("step") for arg in args if isinstance(arg, Batch)), None)
        if step not in self._config.steps:
            return method(*args)
        self._calls[step, name] += 1
        file = self._folder / f"step-{step:06d}" / f"{self._who}-{name}-{self._calls[step, name]}.json"
        config = self._config
        with profile(record_shapes=config.shapes, with_stack=config.stacks, profile_memory=config.memory) as found:
            result = method(*args)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(file))
            if config.memory and self._gpu:
                file.with_suffix(".memory.txt").write_text(torch.cuda.memory_summary(), encoding="utf-8")
        except (OSError, RuntimeError) as error:  # a full disk must not end a run
            print(f"no trace is written to {file}: {error}", file=sys.stderr)
        return result
