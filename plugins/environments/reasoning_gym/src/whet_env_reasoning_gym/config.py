"""The config of the environment `reasoning-gym`, and its facts for planning."""

from typing import Any

from attrs import Attribute, field, frozen, validators

from whet.component import EnvironmentFacts, Selection
from whet.config.bounds import PROCESSES, RECORDS, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet_data.quoting import template_with
from whet_sandbox.limits import Limits

UNUSABLE = {"game_of_life_halting": "its scorer gives 1.0 for any answer, nonsense included"}
"""Data sets that are refused, and why."""
HALF = 1 << 31
"""The seeds of `test` begin this far behind those of `train`. Both together fit into 32 bits, as NumPy wants them."""


def _usable(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if value in UNUSABLE:
        raise ValueError(f"is {value!r}, which cannot be used: {UNUSABLE[value]}")


def _own_options(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    for name, instead in (("seed", "seed"), ("size", "train_tasks and test_tasks")):
        if name in value:
            raise ValueError(f"sets {name!r}, which the environment sets; use {instead} beside `config`")
    entries = value.get("datasets")
    for entry in entries if isinstance(entries, list) else ():
        name = str(entry.get("name")) if isinstance(entry, dict) else ""
        if name in UNUSABLE:
            raise ValueError(f"names {name!r}, which cannot be used: {UNUSABLE[name]}")


@frozen
class ReasoningGymConfig:
    """The tasks of a data set of reasoning-gym. Its own scorer scores the answers, in a sandbox."""

    dataset: str = field(validator=validators.and_(validators.min_len(1), _usable))
    """The data set by its name in reasoning-gym, e.g. `countdown`; or `composite`, a mixture."""
    config: dict[str, Any] = field(factory=dict, validator=_own_options)
    """The data set's own options, e.g. `{min_numbers: 3, max_numbers: 4}`. For `composite`:
    `{datasets: [{name: countdown, weight: 2, config: {...}}, ...]}`."""
    seed: int = field(default=0, validator=between(0, (1 << 30) - 1))
    """The library's seed of `train`. Task i is the library's task i of this seed, and most of its data sets compute it
    from seed + i: take seeds that are at least `train_tasks` apart for tasks of their own. `test` has the seed that
    is 2,147,483,648 larger, so no seed of the one meets a seed of the other."""
    train_tasks: int = field(default=1_000_000, validator=between(1, min(RECORDS, (1 << 30) - 1)))
    """Tasks in the split `train`. Each is made when it is needed."""
    test_tasks: int = field(default=128, validator=between(1, min(RECORDS, (1 << 30) - 1)))
    """Tasks in the split `test`."""
    system: str = "default"
    """The system message: the name of one of the library's own (`default`, `DeepSeekZero`, `simple`, `direct`,
    `chain_of_draft`), or a text of one's own. Empty: none. The answer is expected between <answer> and </answer>."""
    prompt: str = field(default="{question}", validator=template_with(("question",), ("question",)))
    """The prompt. `{question}` is replaced by the library's question."""
    threshold: float = field(default=0.0, validator=between(0, 1))
    """The scores of many data sets lie between 0 and 1, and a wrong answer often scores a little. Above 0: the reward
    is 1 from this score on, else 0. 0: the reward is the score."""
    scorers: int = field(default=2, validator=between(1, PROCESSES))
    """Processes that make tasks and score answers, each in a sandbox. Each takes about 100 MiB."""
    task_seconds: float = field(default=60.0, validator=between(1, 3600))
    """Most time in which a task is made. It counts on the clock."""
    limits: Limits = field(factory=lambda: Limits(cpu_seconds=2.0, memory_mib=1024))
    """Limits of one scoring. An answer that passes them scores 0."""
    sandbox: Selection = selection("sandboxes", "namespaces")
    """Where tasks are made and answers are scored. `namespaces` without `python` and `packages` shows what is installed
    beside whet. So reasoning-gym may also lie in another environment: set both to that environment's."""


def facts(config: ReasoningGymConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: final answers for majority votes, and the splits."""
    return EnvironmentFacts(states_answers=True, splits=("train", "test"))
