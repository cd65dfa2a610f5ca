"""The config of the environment `verifiers`, and its facts for planning."""

import re
from typing import Any

from attrs import field, frozen

from whet.component import EnvironmentFacts
from whet.config.bounds import BYTES, GIB, GROUP, PROCESSES, RECORDS, SECONDS, above, between
from whet.data.model_info import ModelInfo

_MODULE = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)?[A-Za-z_][A-Za-z0-9_.-]*(?:@[A-Za-z0-9_.-]+)?")


def _module(instance: object, attribute: Any, value: str) -> None:
    if not _MODULE.fullmatch(value):
        raise ValueError(f"is {value!r}, wanted the id of a taskset, which is the name of an installed module")


def _without_id(instance: object, attribute: Any, value: dict[str, Any] | None) -> None:
    if value and "id" in value:
        raise ValueError("has the key id; write it as `taskset`, beside this field")


@frozen(kw_only=True)
class VerifiersConfig:
    """A taskset of verifiers 0.4 or later, with its rewards, metrics, judges and tools.

    verifiers runs in processes of its own. Its agents ask the model through the endpoint of their episode.
    """

    taskset: str = field(validator=_module)
    """Id of the taskset: the name of an installed module, as in `verifiers`. It is imported, and never installed."""
    options: dict[str, Any] = field(factory=dict, validator=_without_id)
    """Further keys of the taskset's own config, e.g. `{split: train, task: {judges: [...]}}`."""
    test_options: dict[str, Any] | None = field(default=None, validator=_without_id)
    """The split `test` is the taskset with these keys in place of those of `options`. null: see `test_tasks`."""
    test_tasks: int = field(default=0, validator=between(0, RECORDS))
    """Without `test_options`: the split `test` has the last tasks of the taskset, this many, and `train` the others.
    0: there is no split `test`. With `test_options`: most tasks of `test`; 0: `tasks`."""
    tasks: int = field(default=10_000, validator=between(1, RECORDS))
    """Most tasks that are taken from the taskset, the first ones. Some tasksets have no end."""
    agent: dict[str, Any] = field(factory=dict)
    """Further keys of the agent's config, e.g. `{harness: {id: codex}, runtime: {type: docker}}`. Without a harness,
    the taskset's own one plays, else a plain conversation with the taskset's tools, in the process of verifiers.
    Without a runtime: `{type: subprocess}`. A harness that executes what the model writes is refused with it."""
    max_turns: int = field(default=16, validator=between(1, GROUP))
    """Most responses of the model in an episode."""
    python: str = ""
    """The Python environment that has verifiers and the taskset: the name of an environment of `whet env`, or a path,
    which contains a slash. Empty: that of the run."""
    folders: list[str] = field(factory=list)
    """Folders from which tasksets are imported, besides installed ones."""
    processes: int = field(default=1, validator=between(1, PROCESSES))
    """Most processes of verifiers. Episodes are spread over them."""
    memory_gib: float = field(default=16.0, validator=between(0, GIB))
    """Address space of each process, in GiB. What asks for more gets a `MemoryError`. 0: no limit."""
    start_seconds: float = field(default=300.0, validator=above(0, SECONDS))
    """Deadline for a process to import verifiers and to load the tasks."""
    seconds: float = field(default=60.0, validator=above(0, SECONDS))
    """Longest silence of a process. A process that does not answer for as long is ended, because its code blocks all
    of its episodes."""
    message_bytes: int = field(default=1 << 28, validator=between(1, BYTES))
    """Most bytes of a message of a process."""


def facts(config: VerifiersConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: the splits. No answer can be voted on."""
    tested = config.test_options is not None or config.test_tasks
    return EnvironmentFacts(states_answers=False, splits=("train", "test") if tested else ("train",))
