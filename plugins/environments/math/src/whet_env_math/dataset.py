r"""The environment `math`: questions from a data set; math-verify compares the answers in other processes.

The right answer of a record is checked when the split is loaded: it must equal itself, or no response could be correct.
This process reads model output in linear time. Answers that are not plain numbers go to a grader process with limits.
An answer that cannot be parsed is wrong. An answer that the grader cannot decide about is wrong, too, and is counted in
`grader/undecided`.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from attrs import frozen

from whet.config.sections import DataFile
from whet.data.messages import Conversation, Message
from whet.data.records import Task
from whet.errors import DataError, Undecided
from whet.interfaces.environment import Model
from whet.interfaces.undecided import note
from whet_data.readers import Row, read
from whet_env_math.answers import (
    LONGEST,
    given_answer,
    gold_answer,
    is_bomb,
    normal_answer,
    plain_amount,
    plain_number,
    reads_otherwise,
)
from whet_env_math.config import MathConfig
from whet_sandbox.boxed import last_boxed
from whet_sandbox.pool import GraderCrash, GraderPool, GraderRaised

logger = logging.getLogger(__name__)

QUOTED = 20
"""Most left-out records that a warning quotes. The warning counts all of them."""


class MathDataset:
    """The environment `math`: rewards `correct` and, with a weight, `format`."""

    def __init__(self, config: MathConfig) -> None:
        self._config = config
        self._pattern = _compiled(config.answer_pattern)
        self._pool = GraderPool("whet_env_math.verifier:verifier", config.graders, config.timeout_seconds, setup={})
        self._splits: dict[str, Sequence[Task]] = {}
        self._lock = threading.Lock()

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `correct`, and `format_weight` for `format`."""
        weight = self._config.format_weight
        return {"correct": 1.0, "format": weight} if weight else {"correct": 1.0}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, which is loaded on first use. Raises `DataError` with file and line."""
        with self._lock:
            if split not in self._splits:
                self._splits[split] = self._load(split)
            return self._splits[split]

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Send the question and return the rewards of the response. Raises `GraderCrash` if the graders do not work."""
        answer = await model.reply(task.prompt)
        rewards = {"correct": float(await self._is_correct(answer.text, task.data["answer"]))}
        if self._config.format_weight:
            rewards["format"] = float(last_boxed(answer.text) is not None)
        return rewards

    def final_answer(self, messages: Conversation) -> str | None:
        """Return the model's answer for majority voting. See `normal_answer`."""
        return normal_answer(messages[-1].text, self._config.boxed_only)

    def close(self) -> None:
        """Stop the graders."""
        self._pool.close()

    async def _is_correct(self, text: str, gold: str) -> bool:
        answer = given_answer(text, self._config.boxed_only)
        if answer is None:
            return False
        boxed = last_boxed(answer)
        if boxed is not None and is_bomb(boxed) and not is_bomb(gold):
            return False
        number, wanted = None if boxed is None else plain_amount(boxed), plain_number(gold)
        if number is not None and wanted is not None:
            return number == wanted
        if boxed is not None and reads_otherwise(boxed, gold):
            return False
        try:
            return bool(await self._pool.call(answer, gold))
        except Undecided:
            return False
        except GraderRaised as error:  # the right answer was checked before, so the model's answer is the cause
            note(str(error))
            return False

    def _load(self, split: str) -> Sequence[Task]:
        records = [self._record(row) for row in read(self._file(split))]
        problems = self._proved([record for record in records if not record.problem])
        bad = [f"{r.where}: {r.problem}" for r in records if r.problem] + problems
        if not records or len(bad) > self._config.max_bad_records * len(records):
            lines = "\n".join(f"  {line}" for line in bad[:5])
            raise DataError(
                f"dataset {self._config.dataset!r}, split {split!r}: {len(bad)} of {len(records)} records cannot be "
                f"used, more than the {self._config.max_bad_records:.1%} that max_bad_records allows:\n{lines}"
            )
        if bad:
            said = f"dataset {self._config.dataset!r}, split {split!r}: {len(bad)} of {len(records)} records left out"
            logger.warning("\n  ".join([said, *bad[:QUOTED]]))
        left_out = {line.split(": ", 1)[0] for line in problems}
        return tuple(self._task(r) for r in records if not r.problem and r.where not in left_out)

    def _file(self, split: str) -> DataFile:
        given, config = self._config.dataset, self._config
        if isinstance(given, str):
            return DataFile(given, split=split, subset=config.subset, limit=config.max_records)
        if split not in given:
            raise DataError(f"there is no split {split!r}; dataset names {', '.join(given)}")
        return DataFile(given[split], limit=config.max_records)

    def _record(self, row: Row) -> "_Record":
        if row.problem:
            return _Record(row.where, problem=row.problem)
        question, field = row.record.get(self._config.question), row.record.get(self._config.answer)
        for name, value in ((self._config.question, question), (self._config.answer, field)):
            if value is None or not str(value).strip():
                return _Record(
                    row.where, problem=f"the field {name!r} is missing or empty; there are {list(row.record)!r:.120}"
                )
        gold = gold_answer(str(field), self._pattern)
        if gold is None or len(gold) > LONGEST:
            return _Record(row.where, problem=f"no answer is found in {str(field)[-80:]!r}")
        return _Record(row.where, str(question), gold)

    def _task(self, record: "_Record") -> Task:
        system = (Message("system", self._config.system),) if self._config.system else ()
        asked = self._config.prompt.replace("{question}", record.question)
        return Task((*system, Message("user", asked)), {"answer": record.gold}, id=record.where)

    def _proved(self, records: Sequence["_Record"]) -> list[str]:
        """Grade every right answer against itself. Returns a message for each answer that is not equal to itself."""
        doubtful = [record for record in records if plain_number(record.gold) is None]

        async def prove(record: "_Record") -> str:
            try:
                same = await self._pool.call(f"\\boxed{{{record.gold}}}", record.gold)
            except (Undecided, GraderCrash, GraderRaised) as error:
                return f"{record.where}: the answer {record.gold!r} cannot be graded: {error}"
            return "" if same else f"{record.where}: the answer {record.gold!r} cannot be parsed"

        async def prove_all() -> list[str]:
            return await asyncio.gather(*map(prove, doubtful))

        if not doubtful:
            return []
        # a thread of its own, because an event loop may be running in this thread
        with ThreadPoolExecutor(1) as thread:
            return [problem for problem in thread.submit(asyncio.run, prove_all()).result() if problem]


@frozen
class _Record:
    where: str
    question: str = ""
    gold: str = ""
    problem: str = ""


def _compiled(pattern: str) -> re.Pattern[str] | None:
    if not pattern:
        return None
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise DataError(f"answer_pattern {pattern!r} is no regular expression: {error}") from error
    if not compiled.groups:
        raise DataError(f"answer_pattern {pattern!r} has no group (...) that would be the answer")
    return compiled
