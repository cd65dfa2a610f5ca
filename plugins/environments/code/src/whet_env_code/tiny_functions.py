r"""The environment `tiny-functions`: generated tasks such as `f(n) = |3*n-4|+2`, for a small model and a first run.

    user       f(n) = |3*n-4|+2
    assistant  def f(n): return abs(3*n-4)+2

Hidden tests call the function with a few numbers, in a sandbox. One task in ten is held out by its hash for the split
`test`. No task of `train` and no demonstration is a held-out one.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from whet.data.messages import Message
from whet.data.randomness import derive_seed
from whet.data.records import Task
from whet.errors import DataError
from whet.interfaces.environment import Model
from whet_data.generated import GeneratedTasks, held_out
from whet_env_code.config import TinyFunctionsConfig
from whet_env_code.grading import Grader
from whet_env_code.responses import program_in
from whet_sandbox.open import open_sandbox

ARGUMENTS = (-9, -2, 0, 1, 7)
"""The numbers with which tests call a function. With some of them every `|...|` is negative."""
FACTORS, SHIFTS, OFFSETS = range(2, 10), range(1, 10), range(1, 10)


@frozen
class Function:
    """The function |factor n - shift| + offset."""

    factor: int
    shift: int
    offset: int

    def __call__(self, number: int) -> int:
        """Return its value."""
        return abs(self.factor * number - self.shift) + self.offset

    @property
    def question(self) -> str:
        """Return the task."""
        return f"f(n) = |{self.factor}*n-{self.shift}|+{self.offset}"

    def program(self, careful: bool = True) -> str:
        """Return a program. A careless one leaves the bars out."""
        inner = f"{self.factor}*n-{self.shift}"
        return f"def f(n): return {f'abs({inner})' if careful else inner}+{self.offset}"

    def tests(self) -> str:
        """Return the hidden tests."""
        lines = "".join(f"    assert candidate({one}) == {self(one)}\n" for one in ARGUMENTS)
        return f"def check(candidate):\n{lines}"

    @property
    def held_out(self) -> bool:
        """Return whether the function is held out for the split `test`. One in ten is."""
        return held_out(self.question)


def _every() -> list[Function]:
    return [Function(factor, shift, offset) for factor in FACTORS for shift in SHIFTS for offset in OFFSETS]


def drawn(functions: Sequence[Function], count: int, seed: int) -> Sequence[Task]:
    """Return tasks of functions, drawn by position."""
    return GeneratedTasks(
        count, lambda i: _task(random.Random(derive_seed(seed, "tiny-functions", i)).choice(functions))
    )


class TinyFunctions:
    """The environment `tiny-functions`: one turn, reward `correct`."""

    def __init__(self, config: TinyFunctionsConfig) -> None:
        self._sandbox = open_sandbox(config.sandbox, config.limits)
        self._grader = Grader(self._sandbox, max(1, self._sandbox.at_once // 2), every=False)
        train, test = ([one for one in _every() if one.held_out == held] for held in (False, True))
        shuffled = random.Random(derive_seed(config.seed, "tiny-functions-test")).sample(test, len(test))
        self._splits: dict[str, Sequence[Task]] = {
            "train": drawn(train, config.train_tasks, config.seed),
            "test": tuple(map(_task, shuffled[: config.test_tasks])),
        }

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `correct`."""
        return {"correct": 1.0}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`."""
        if split not in self._splits:
            raise DataError(f"there is no split {split!r}; there are {', '.join(self._splits)}")
        return self._splits[split]

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode: one response, graded by hidden tests."""
        reply = await model.reply(task.prompt)
        program = program_in(reply.text, "", "f")
        verdict = await self._grader.by_tests(program, task.data["tests"], name="f")
        model.record("verdict", verdict.reason or "correct")
        return {"correct": float(verdict.correct)}

    def close(self) -> None:
        """End all sandboxes."""
        self._sandbox.close()


def demonstrations(count: int, seed: int = 0, careless_share: float = 0.5) -> Iterator[dict[str, Any]]:
    """Yield records for supervised fine-tuning. A share of the programs is careless, and fails hidden tests."""
    draw = random.Random(derive_seed(seed, "tiny-functions-demonstrations"))
    functions = [one for one in _every() if not one.held_out]
    for _ in range(count):
        function = draw.choice(functions)
        program = function.program(careful=draw.random() >= careless_share)
        messages = [("user", function.question), ("assistant", program)]
        yield {"messages": [{"role": role, "content": text} for role, text in messages]}


def _task(function: Function) -> Task:
    return Task((Message("user", function.question),), {"tests": function.tests()}, id=function.question)
