"""The environment `code`: the model writes a program, which hidden tests grade.

    task -> response with a program -> tests in another sandbox -> reward `correct`

With `turns` above 1 the model may run Python first:

    task -> ```run ... ``` -> output -> ```run ... ``` -> output -> ```python ... ``` -> tests
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from whet.data.messages import Message, conversation
from whet.data.records import Task
from whet.errors import ContextFull, DataError
from whet.interfaces.environment import Model
from whet_data.quoting import filled, shown
from whet_data.readers import Row
from whet_data.tasks import load_tasks, split_file
from whet_env_code.config import CodeConfig
from whet_env_code.grading import Grader, Verdict
from whet_env_code.responses import defines, ending, program_in, tool_call, whole
from whet_sandbox.interpreter import Interpreter
from whet_sandbox.open import open_sandbox
from whet_sandbox.sandbox import Sandbox

_LONGEST_REASON: Final = 1000


class Code:
    """The environment `code`. A split is loaded when it is first used."""

    def __init__(self, config: CodeConfig) -> None:
        self._config = config
        self._sandbox = open_sandbox(config.sandbox, config.limits)
        pairs = max(1, self._sandbox.at_once // 2)
        self._grader = Grader(self._sandbox, pairs, every=config.partial_weight > 0)
        self._tools: Sandbox | None = None
        if config.turns > 1:
            self._tools = open_sandbox(config.sandbox, config.limits, at_once=config.tool_sessions)
        self._splits: dict[str, Sequence[Task]] = {}

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `correct`, and `partial_weight` for `passed`. `runs`, the calls of the tool, has weight 0."""
        weights = {"correct": 1.0}
        if self._config.partial_weight:
            weights["passed"] = self._config.partial_weight
        return weights | ({"runs": 0.0} if self._tools is not None else {})

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raises `DataError` with file and line."""
        if split not in self._splits:
            config = self._config
            file = split_file(config.dataset, split, config.subset, config.max_records)
            named = f"dataset {config.dataset!r}, split {split!r}"
            wrong = self._wrong_solutions(file) if config.check_solutions else {}

            def task(row: Row) -> Task:
                if row.where in wrong:
                    raise DataError(f"its own solution fails: {wrong[row.where]}")
                return self._task(row)

            self._splits[split] = load_tasks(file, named, task, config.max_bad_records)
        return self._splits[split]

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode: the tool as often as the model calls it, then the tests. Returns the rewards."""
        reply = await model.reply(task.prompt)
        runs = 0
        if self._tools is not None:
            async with Interpreter(self._tools) as interpreter:
                while runs + 1 < self._config.turns and (code := tool_call(reply.text)) is not None:
                    output = shown(await interpreter.output(code), self._config.tool_output)
                    runs += 1
                    try:
                        reply = await model.reply(Message("user", output))
                    except ContextFull:
                        break
        verdict = await self._graded(task, reply.text)
        model.record("verdict", verdict.reason[:_LONGEST_REASON] or "correct")
        rewards = {"correct": float(verdict.correct)}
        if self._config.partial_weight:
            rewards["passed"] = verdict.share
        return rewards | ({"runs": float(runs)} if self._tools is not None else {})

    def close(self) -> None:
        """End all sandboxes."""
        self._sandbox.close()
        if self._tools is not None:
            self._tools.close()

    async def _graded(self, task: Task, text: str) -> Verdict:
        program = program_in(text, task.data["before"], task.data["name"])
        if not program.strip():
            return Verdict(0, 1, "the response has no program")
        return await self._verdict(program, task)

    async def _verdict(self, program: str, task: Task) -> Verdict:
        data = task.data
        if data["cases"]:
            return await self._grader.by_cases(program, data["cases"])
        given = {key: data[key] for key in ("name", "before", "setup")}
        return await self._grader.by_tests(program, data["tests"], **given)

    def _task(self, row: Row) -> Task:
        config = self._config
        asked = _text(row, config.question)
        cases = _cases(row, config.cases) if config.cases else []
        tests = "" if config.cases else _tests(row, config.tests)
        name = str(row.record.get(config.entry_point) or "") if config.entry_point else ""
        data: dict[str, Any] = {
            "before": str(row.record.get(config.before) or "") if config.before else "",
            "setup": str(row.record.get(config.setup) or "") if config.setup else "",
            "name": name, "tests": tests, "cases": cases,
        }  # fmt: skip
        if data["before"] and (not defines(data["before"], name) if name else ending(data["before"]) is None):
            data["before"] = ""  # it is a question in words
        text = filled(config.prompt, {"question": asked})
        if config.turns > 1:
            text = f"{text}\n\n{config.tool_prompt}"
        system = [Message("system", config.system)] if config.system else []
        return Task(conversation([*system, Message("user", text)]), data, id=row.where)

    def _wrong_solutions(self, file: Any) -> dict[str, str]:
        """Grade the own solution of every record. Return the reason of each wrong one, by the place of its record."""
        from whet_data.readers import read

        async def grade(row: Row) -> str:
            task, solution = self._task(row), str(row.record.get(self._config.solution) or "")
            before, name = task.data["before"], task.data["name"]
            program = whole(before, solution) if name and defines(solution, name) else before + solution
            return (
                (await self._verdict(program, task)).reason
                if solution
                else f"there is no field {self._config.solution!r}"
            )

        async def grade_all() -> dict[str, str]:
            rows = [row for row in read(file) if not row.problem and self._is_task(row)]
            reasons = await asyncio.gather(*map(grade, rows))
            return {row.where: reason for row, reason in zip(rows, reasons, strict=True) if reason}

        with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this thread
            return thread.submit(asyncio.run, grade_all()).result()

    def _is_task(self, row: Row) -> bool:
        try:
            self._task(row)
        except DataError:
            return False
        return True


def _text(row: Row, field: str) -> str:
    value = row.record.get(field)
    if value is None or not str(value).strip():
        raise DataError(f"the field {field!r} is missing or empty; there are {list(row.record)!r:.120}")
    return str(value)


def _tests(row: Row, field: str) -> str:
    value = row.record.get(field)
    tests = "\n".join(map(str, value)) if isinstance(value, list) else str(value or "")
    if "assert" not in tests:
        raise DataError(f"the tests in the field {field!r} assert nothing; there are {list(row.record)!r:.120}")
    return tests


def _cases(row: Row, field: str) -> list[dict[str, str]]:
    value = row.record.get(field)
    try:
        held: Any = json.loads(value) if isinstance(value, str) else value
        inputs, outputs = held["inputs"], held["outputs"]
        pairs = [{"input": _lines(one), "output": _lines(other)} for one, other in zip(inputs, outputs, strict=True)]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"the field {field!r} has no `inputs` and `outputs` of one length: {error}") from error
    if not pairs:
        raise DataError(f"the field {field!r} has no case")
    if held.get("fn_name"):
        words = "wanted programs that read stdin, or `tests` that call a function"
        raise DataError(f"the cases in the field {field!r} call the function {held['fn_name']!r:.60}; {words}")
    return pairs


def _lines(value: Any) -> str:
    """Return the text of an input or output: a text, a number, or a list of lines. Raises `TypeError`."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    if not isinstance(value, str | int | float):
        raise TypeError(f"{value!r:.60} is neither text nor a list of lines")
    return str(value)
