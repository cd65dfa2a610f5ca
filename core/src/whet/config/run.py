"""The section `run` of a config file: the run folder, the length of a run, its checkpoints."""

import re
from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import min_len, optional

from whet.config.bounds import GROUP, SEED, STEPS, above, between

LONGEST_SECONDS = 365 * 86_400
"""The largest time limit, in seconds."""
_DURATION = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s)?", re.ASCII)


def seconds_of(duration: str) -> float:
    """Return the seconds of a duration, e.g. `3h50m`. Raises `ValueError` for other text."""
    found = _DURATION.fullmatch(duration) if duration else None
    if found is None:
        raise ValueError(f"is {duration!r:.60}, wanted days, hours, minutes and seconds, e.g. 3h50m or 1d12h")
    return float(sum(int(n or 0) * unit for n, unit in zip(found.groups(), (86_400, 3_600, 60, 1), strict=True)))


def _time_limit(instance: object, attribute: Any, value: str) -> None:
    """Refuse text that is no duration, and durations that no run can keep to."""
    if value and not 1 <= seconds_of(value) <= LONGEST_SECONDS:
        raise ValueError(f"is {value}, wanted at least 1s and at most {LONGEST_SECONDS // 86_400}d")


def _folder(instance: object, attribute: Any, value: str) -> None:
    """Refuse text that does not fit on one line: messages, logs and commands contain the run folder."""
    if not value.isprintable():
        raise ValueError(f"is {value!r:.60}, wanted the path of a folder without line breaks or control characters")


_FOLDER: Any = [min_len(1), _folder]


def _length(instance: Any, attribute: Any, value: float | None) -> None:
    """Refuse a run whose length is stated twice, or not at all."""
    if instance.steps is not None and value is not None:
        raise ValueError(f"is {value:g}, and run.steps is {instance.steps}; state one of the two")
    if instance.steps is None and value is None:
        raise ValueError("states neither `steps` nor `epochs`: how long to train")


@frozen
class KeepBestSection:
    """Which checkpoints are the best. A step that is not saved, or not evaluated, has none."""

    metric: str = field(validator=min_len(1))
    """A metric of the step that is saved, e.g. `evaluation/test/correct` or `validation/loss`."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Whether the largest or the smallest value is the best. `auto`: the smallest of metrics that end in `loss` or
    `perplexity`, else the largest. Of equal values the first is."""
    count: int = field(default=1, validator=between(1, GROUP))
    """Number of checkpoints to keep, the best ones."""

    @property
    def smallest(self) -> bool:
        """Return whether the smallest value is the best."""
        return self.mode == "min" or (self.mode == "auto" and self.metric.endswith(("loss", "perplexity")))


@frozen
class RunSection:
    """The run itself."""

    folder: str = field(validator=_FOLDER, metadata={"path": True})
    """The folder that the run writes to."""
    steps: int | None = field(default=None, validator=optional(between(1, STEPS)))
    """Number of steps to take, counted over resumes. State this or `epochs`."""
    epochs: float | None = field(default=None, validator=[optional(above(0, 1_000_000)), _length])
    """For algorithms that train on data files, instead of `steps`: how often to train on every record, e.g. 3 or 0.5.
    The last step takes the records that are left, which may be fewer than `batch_size`."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Every random draw of the run is derived from this seed."""
    save_every: int = field(default=0, validator=between(0, STEPS))
    """Number of steps between checkpoints; 0: only at the end."""
    keep: int = field(default=2, validator=between(0, GROUP))
    """Number of checkpoints to keep, the newest; 0 keeps all."""
    keep_best: KeepBestSection | None = None
    """Checkpoints to keep beside the newest: those of the steps with the best value of a metric."""
    save_in_background: bool = True
    """Whether training goes on while a checkpoint is written. The backend holds a copy of all that it saves in host
    memory until the files are durable: 12 bytes for each parameter with AdamW. `false`: the run waits, and no copy is
    made. The run also waits for a backend that cannot save in the background."""
    time_limit: str = field(default="", validator=_time_limit)
    """Time by which the process is to have ended, e.g. `3h50m`, counted from its start. The run ends as on SIGTERM when
    the time that is left does not suffice for another step and a save. Empty: no limit."""
    resume: Literal["auto", "never", "must"] = "auto"
    """`auto` continues the folder's run, if any. `never` refuses a folder with a run, `must` a folder without one."""
    allow_changed: list[str] = attrs.Factory(list)
    """Config paths that may differ from those of the resumed run, e.g. `backend.optimizer.lr`."""
    export: bool = True
    """Write the final model as a folder that `transformers` loads, in `FOLDER/model`."""
    private_records: bool = True
    """Whether only this user may read prompts and responses: the rows of rollouts, evaluations and the endpoint.
    `false`: the umask decides, as for all other files of the run folder."""
