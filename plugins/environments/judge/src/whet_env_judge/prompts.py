"""An environment of prompts from a data set. It has no rewards of its own; the judge gives the only one."""

from collections.abc import Mapping, Sequence

from whet.data.messages import Message, conversation
from whet.data.records import GOLD, Task
from whet.errors import DataError
from whet.interfaces.environment import Model
from whet_data.readers import Row
from whet_data.tasks import load_tasks, split_file
from whet_env_judge.config import JudgedConfig


class Prompts:
    """An environment with one prompt and one response. A split is loaded when it is first used."""

    reward_weights: Mapping[str, float] = {}

    def __init__(self, config: JudgedConfig) -> None:
        self._config = config
        self._splits: dict[str, Sequence[Task]] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raises `DataError` with file and line."""
        if split not in self._splits:
            config = self._config
            file = split_file(config.dataset, split, config.subset, config.max_records)
            named = f"dataset {config.dataset!r}, split {split!r}"
            self._splits[split] = load_tasks(file, named, self._task, config.max_bad_records)
        return self._splits[split]

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Send the prompt to the model. Returns no rewards."""
        await model.reply(task.prompt)
        return {}

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _task(self, row: Row) -> Task:
        value = row.record.get(self._config.question)
        if value is None:
            raise DataError(f"the field {self._config.question!r} is missing; there are {list(row.record)!r:.120}")
        asked = conversation(value)
        if not asked or asked[-1].role == "assistant" or not any(message.text.strip() for message in asked):
            raise DataError(f"the prompt is {value!r:.120}, wanted words that the model is to respond to")
        system = (Message("system", self._config.system),) if self._config.system else ()
        gold = row.record.get(self._config.gold) if self._config.gold else None
        return Task((*system, *asked), {} if gold is None else {GOLD: str(gold)}, id=row.where)
