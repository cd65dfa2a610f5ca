"""An environment of prompts from a data set. It has no rewards of its own; the judge gives the only one."""

import logging
from collections.abc import Mapping, Sequence

from whet.config.sections import DataFile
from whet.data.messages import Conversation, Message, conversation
from whet.data.records import Task
from whet.errors import DataError
from whet.interfaces.environment import Model
from whet_data.readers import Row, read
from whet_env_judge.config import JudgeConfig

logger = logging.getLogger(__name__)

QUOTED = 20
"""Most left-out records that a warning quotes. The warning counts all of them."""


class Prompts:
    """An environment with one prompt and one response. A split is loaded when it is first used."""

    reward_weights: Mapping[str, float] = {}

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._splits: dict[str, Sequence[Task]] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raises `DataError` with file and line."""
        if split not in self._splits:
            self._splits[split] = self._load(split)
        return self._splits[split]

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Send the prompt to the model. Returns no rewards."""
        await model.reply(task.prompt)
        return {}

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _load(self, split: str) -> Sequence[Task]:
        tasks, bad = list[Task](), list[str]()
        for row in read(self._file(split)):
            try:
                tasks.append(Task(self._prompt(row), {}, id=row.where))
            except DataError as error:
                bad.append(f"{row.where}: {error}")
        count, named = len(tasks) + len(bad), f"dataset {self._config.dataset!r}, split {split!r}"
        if not tasks or len(bad) > self._config.max_bad_records * count:
            lines = "\n".join(f"  {line}" for line in bad[:5])
            raise DataError(
                f"{named}: {len(bad)} of {count} records cannot be used, more than the "
                f"{self._config.max_bad_records:.1%} that max_bad_records allows:\n{lines}"
            )
        if bad:
            logger.warning("\n  ".join([f"{named}: {len(bad)} of {count} records left out", *bad[:QUOTED]]))
        return tuple(tasks)

    def _file(self, split: str) -> DataFile:
        given, config = self._config.dataset, self._config
        if isinstance(given, str):
            return DataFile(given, split=split, subset=config.subset, limit=config.max_records)
        if split not in given:
            raise DataError(f"there is no split {split!r}; dataset names {', '.join(given)}")
        return DataFile(given[split], limit=config.max_records)

    def _prompt(self, row: Row) -> Conversation:
        if row.problem:
            raise DataError(row.problem)
        value = row.record.get(self._config.question)
        if value is None:
            raise DataError(f"the field {self._config.question!r} is missing; there are {list(row.record)!r:.120}")
        asked = conversation(value)
        if not asked or asked[-1].role == "assistant" or not any(message.text.strip() for message in asked):
            raise DataError(f"the prompt is {value!r:.120}, wanted words that the model is to respond to")
        system = (Message("system", self._config.system),) if self._config.system else ()
        return (*system, *asked)
