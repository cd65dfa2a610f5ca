"""Where an environment around other tasks gets its tasks: the prompts of a data set, or another environment."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from attrs import field, frozen, validators

from whet.component import EnvironmentFacts, Selection
from whet.config.bounds import FACTOR, RECORDS, between
from whet.config.build import build_selection
from whet.config.sections import optional_selection
from whet.data.model_info import ModelInfo
from whet.data.records import GOLD, Task
from whet.errors import DataError
from whet.interfaces.environment import Environment, Model
from whet.plan.plan import facts_of
from whet_data.layouts import found_words
from whet_data.readers import Row, read
from whet_data.tasks import DatasetTasks, split_file
from whet_data.turns import conversation_of, parsed, refuse_no_turns, tools_of, with_system


def _one_source(instance: "SourceConfig", attribute: Any, value: object) -> None:
    if bool(value) == (instance.environment is not None):
        found = "both" if value else "neither"
        raise ValueError(f"{found} of dataset and environment given; wanted one: prompts, or what plays the tasks")


@frozen
class SourceConfig:
    """What is played: the prompts of a data set, or the episodes of another environment."""

    environment: Selection | None = optional_selection("environments")
    """An environment that plays the episodes, e.g. `{use: arithmetic}`. Its own rewards are recorded, too."""
    dataset: str | dict[str, str] = field(default="", validator=_one_source, metadata={"path": True})
    """Instead of an environment: a file of prompts, a folder with one file for each split, or a name on the Hugging
    Face hub; or one file for each split, e.g. `{train: a.jsonl, test: b.jsonl}`. A single file is used for every
    split."""
    subset: str = ""
    """The subset of a hub data set that has several subsets."""
    question: str = "prompt"
    """The field with the prompt: a string, or a list of messages, which may have tool calls and reasoning in fields.
    In tables it may be the JSON text of this list. Records with tools of their own, in the column `tools`, are bad."""
    gold: str = ""
    """The field with a reference answer, or a list of them, for records, and for whatever compares responses with it.
    A dot leads into a field, or into its JSON text, e.g. `reward_model.ground_truth`. Empty: none."""
    system: str = ""
    """A system message before prompts that have none, in their messages or a column `system`. Empty: none."""
    max_records: int = field(default=0, validator=between(0, RECORDS))
    """Use only the first records of a split, at most this many. 0: all."""
    max_bad_records: float = field(default=0.0, validator=[validators.ge(0), validators.le(1)])
    """Largest share of records that may be left out because they have no prompt."""
    environment_weight: float = field(default=0.0, validator=between(-FACTOR, FACTOR))
    """Factor on the weights of the environment's own rewards. 0: these rewards are recorded, but not trained on."""


def facts_within(config: SourceConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts of the wrapped environment, or the facts of a data set of prompts."""
    if config.environment:
        return facts_of(config.environment, model, EnvironmentFacts)
    splits = tuple(config.dataset) if isinstance(config.dataset, dict) else None
    return EnvironmentFacts(states_answers=False, splits=splits)


def opened(config: SourceConfig, roles: Mapping[str, Any]) -> Environment:
    """Return the wrapped environment, built with the roles that it needs, or the prompts of the data set."""
    if config.environment is None:
        return Prompts(config)
    needs = facts_of(config.environment, ModelInfo("", {}), EnvironmentFacts).roles
    built = build_selection(config.environment, *([{name: roles[name] for name in needs}] if needs else []))
    return cast(Environment, built)


class Prompts:
    """An environment with one prompt and one response. A split is loaded when it is first used."""

    reward_weights: Mapping[str, float] = {}

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._tasks = DatasetTasks(config, self._task, config.question)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raises `DataError` with file and line, or if no record has an answer."""
        tasks, config = self._tasks(split), self._config
        if config.gold and not any(GOLD in task.data for task in tasks):
            first = next(read(split_file(config.dataset, split, config.subset, limit=1)))
            raise DataError(
                f"dataset {config.dataset!r}, split {split!r}: no record has an answer in the field {config.gold!r} "
                f"(`gold`); the first one has the columns {found_words(first.record)}"
            )
        return tasks

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
        if row.record.get("tools") and tools_of(row.record["tools"]):
            words = "write them into the prompt, and leave out the column"
            raise DataError(
                f"the column `tools` has tools, which this environment does not offer to the model; {words}"
            )
        refuse_no_turns(row.record, {"prompt": self._config.question}, ["prompt"])
        asked = conversation_of(value)
        if not asked or asked[-1].role == "assistant" or not any(message.text.strip() for message in asked):
            raise DataError(f"the prompt is {value!r:.120}, wanted words that the model is to respond to")
        names = {"prompt": self._config.question, "gold": self._config.gold}
        asked, _ = with_system(row.record, names, asked)
        asked, _ = with_system({"system": self._config.system}, {}, asked)
        gold = self._gold(row)
        return Task(asked, {} if gold is None else {GOLD: gold}, id=row.where)

    def _gold(self, row: Row) -> str | list[str] | None:
        """Return the reference answer of a record, or its several ones, where it has any."""
        gold, found = self._config.gold, cast(Any, row.record)
        if not gold:
            return None
        for name in [gold] if gold in found else gold.split("."):
            found = parsed(found, f"the field before {name!r} in {gold!r} (`gold`)")
            found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, list | tuple):
            return [str(one) for one in found if one is not None] or None
        return None if found is None else str(found)
