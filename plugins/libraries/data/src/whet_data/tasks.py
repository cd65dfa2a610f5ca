"""Tasks of an environment from the rows of a data set. Bad rows are counted, and refused above a limit."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from whet.config.sections import DataFile
from whet.data.records import Task
from whet.errors import DataError
from whet_data.layouts import with_turns
from whet_data.readers import Row, read

logger = logging.getLogger(__name__)

QUOTED = 20
"""Most left-out records that a warning quotes. The warning counts all of them."""


def split_file(dataset: str | Mapping[str, str], split: str, subset: str = "", limit: int = 0) -> DataFile:
    """Return the file of a split. Raises `DataError` if files are named for other splits only."""
    if isinstance(dataset, str):
        return DataFile(dataset, split=split, subset=subset, limit=limit)
    if split not in dataset:
        raise DataError(f"there is no split {split!r}; dataset names {', '.join(dataset)}")
    return DataFile(dataset[split], limit=limit)


class DatasetConfig(Protocol):
    """What a config of an environment has whose tasks are the records of a data set."""

    @property
    def dataset(self) -> str | Mapping[str, str]: ...  # noqa: D102

    @property
    def subset(self) -> str: ...  # noqa: D102

    @property
    def max_records(self) -> int: ...  # noqa: D102

    @property
    def max_bad_records(self) -> float: ...  # noqa: D102


class DatasetTasks:
    """The tasks of a data set, a task for each record. A split is loaded when it is first asked for.

    `prompt`: the column of the prompt, if it may have turns in other forms than messages.
    """

    def __init__(self, config: DatasetConfig, make: Callable[[Row], Task], prompt: str = "") -> None:
        self._config, self._make, self._prompt = config, make, prompt
        self._splits: dict[str, tuple[Task, ...]] = {}

    def __call__(self, split: str) -> tuple[Task, ...]:
        """Return the tasks of a split. Raises `DataError` with file and line."""
        if split not in self._splits:
            config = self._config
            file = split_file(config.dataset, split, config.subset, config.max_records)
            named = f"dataset {config.dataset!r}, split {split!r}"
            self._splits[split] = load_tasks(file, named, partial(self._task, file), config.max_bad_records)
        return self._splits[split]

    def _task(self, file: DataFile, row: Row) -> Task:
        return self._make(with_turns(row, file, self._prompt) if self._prompt else row)


def load_tasks(file: DataFile, named: str, make: Callable[[Row], Task], max_bad: float) -> tuple[Task, ...]:
    """Return a task for each row of a file. A row is bad if it is damaged or `make` raises `DataError`.

    Raises `DataError` with file and line if more than the share `max_bad` of the rows is bad, or no row is good.

    :param named: the data set in words, for messages.
    """
    tasks, bad = list[Task](), list[str]()
    for row in read(file):
        try:
            if row.problem:
                raise DataError(row.problem)
            tasks.append(make(row))
        except DataError as error:
            bad.append(f"{row.where}: {error}")
    count = len(tasks) + len(bad)
    if not tasks or len(bad) > max_bad * count:
        lines = "\n".join(f"  {line}" for line in bad[:5])
        raise DataError(
            f"{named}: {len(bad)} of {count} records cannot be used, more than the "
            f"{max_bad:.1%} that max_bad_records allows:\n{lines}"
        )
    if bad:
        logger.warning("\n  ".join([f"{named}: {len(bad)} of {count} records left out", *bad[:QUOTED]]))
    return tuple(tasks)
