"""A `RoleContext` with which a test builds a backend or a generator without a run."""

from pathlib import Path
from typing import TYPE_CHECKING

from whet.data.model_info import read_model
from whet.interfaces.logger import RunInfo
from whet.interfaces.workers import RoleContext
from whet.runtime.inline import InlineWorkerGroup

if TYPE_CHECKING:
    from whet.interfaces.workers import WorkerGroup


def make_context(
    tmp_path: Path,
    role: str,
    model_folder: Path,
    worker_group: "WorkerGroup | None" = None,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_context: int = 0,
    transport: str = "",
) -> RoleContext:
    """Return a context whose run folder is in `tmp_path`.

    By default the context has one worker in this process, so that a debugger works.
    """
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    for folder in (run, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    return RoleContext(
        worker_group=worker_group or InlineWorkerGroup(role),
        model=read_model(model_folder, dtype),
        run=RunInfo(run, "test", steps=4),
        seed=seed,
        scratch=scratch,
        max_context=max_context,
        transport=transport,
    )
