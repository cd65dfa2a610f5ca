"""The logger: one run of W&B for one run of whet, however often the run is killed and resumed."""

import os
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import wandb

from whet.errors import ConfigError, WhetError
from whet.interfaces.logger import RunInfo
from whet_tracking.logger import STEP, TrackingLogger, name_of
from whet_wandb import offline
from whet_wandb.config import WandbConfig

FILE = "wandb.json"
"""File of the run folder with the id of the run at W&B."""


class WandbLogger(TrackingLogger):
    """Sends a run to W&B, as far as W&B does not have it yet."""

    def __init__(self, config: WandbConfig, run: RunInfo) -> None:
        super().__init__(config, run)
        # W&B copies tables here until they are sent. Its own default is in the home folder.
        os.environ.setdefault("WANDB_DATA_DIR", str(run.folder / "wandb"))
        run_id, known = name_of(run.folder, FILE, "id", secrets.token_hex(4))
        settings = wandb.setup().settings  # the environment variables, and the files that `wandb` commands write
        mode = _mode(config.mode or settings.mode)
        last, step = offline.last_row(run.folder, run_id) if known and mode == "offline" else (-1, -1)
        try:
            self._run = wandb.init(
                project=config.project or settings.project or "whet", entity=config.entity or None,
                name=config.name or settings.run_name or run.name, id=run_id,
                group=config.group or None, tags=config.tags or None, config=dict(run.config), dir=run.folder,
                mode=mode, resume="allow" if mode == "online" else None, reinit="create_new",
                settings=wandb.Settings(
                    console="off", silent=mode == "offline", disable_git=True, finish_timeout=config.finish_seconds
                ),
            )  # fmt: skip
        except wandb.Error as error:
            words = "; where W&B cannot be reached, set the logger's `mode: offline`" * (mode == "online")
            raise WhetError(f"W&B does not begin the run: {error}{words}") from error
        if mode == "online":
            last = self._run.starting_step - 1
            step = int(self._run.summary.get(STEP, -1)) if last >= 0 else -1
        self._next: int | None = last + 1  # of the first row; W&B counts on from there
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self.catch_up(step)

    def send(self, step: int, values: Mapping[str, Any], whole: bool) -> None:
        """Add values to the present row of W&B; complete the row with the metrics of a step."""
        self._run.log(dict(values), step=self._next, commit=whole)
        self._next = None

    def table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        """Return a table of W&B."""
        return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)

    def histogram(self, counts: list[int], bounds: list[float]) -> Any:
        """Return a histogram of W&B, with neighbouring bins merged where W&B takes fewer."""
        each = -(-len(counts) // wandb.Histogram.MAX_LENGTH)
        if each > 1:
            counts = [sum(counts[i : i + each]) for i in range(0, len(counts), each)]
            bounds = [*bounds[:-1:each], bounds[-1]]
        return wandb.Histogram(np_histogram=(counts, bounds))

    def finish(self, failed: bool) -> None:
        """End the run; W&B marks it as finished or failed."""
        self._run.finish(exit_code=int(failed))


def _mode(name: str) -> Literal["online", "offline", "disabled"]:
    """Return a mode of W&B by its name of today. Raises `ConfigError` for a mode that this logger lacks."""
    match name:
        case "online" | "run":
            return "online"
        case "offline" | "dryrun":
            return "offline"
        case "disabled":
            return "disabled"
    raise ConfigError(
        f"WANDB_MODE is {name!r}, wanted `online`, `offline` or `disabled`; change it, or set the logger's `mode`"
    )
