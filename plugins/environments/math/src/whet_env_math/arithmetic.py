r"""Generated arithmetic: `Compute 7+8-3+6-1+2.`, answered in `\boxed{19}` and graded exactly.

Every task is computed from its position. One expression in ten is held out by its hash for the split `test`. No task of
`train` and no demonstration contains a held-out expression.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from whet.data.messages import Message
from whet.data.randomness import derive_seed
from whet.data.records import Group, Task
from whet.errors import DataError
from whet.interfaces.environment import SingleTurn
from whet_data.generated import GeneratedTasks, held_out
from whet_env_math.config import ArithmeticConfig
from whet_ops.curriculum import PassRateCurriculum
from whet_sandbox.boxed import boxed_integer, is_integer, last_boxed

PHRASINGS = ("Compute {}.", "What is {}?")
MOST_DRAWS = 20_000
"""Most draws for one problem. With the defaults 4 chains in 10 are in bounds, and 1 in 10 of these is held out."""


@frozen
class Problem:
    """One chain: its expression and its intermediate sums."""

    expression: str
    sums: tuple[tuple[int, str, int, int], ...]
    """(total so far, `+` or `-`, operand, new total)."""
    question: str

    @property
    def answer(self) -> str:
        """Return the last total, as text."""
        return str(self.sums[-1][3])

    def stated(self) -> str:
        """Return a response that only states the answer."""
        return f"\\boxed{{{self.answer}}}"

    def worked(self) -> str:
        """Return a response that shows every intermediate sum and then the answer."""
        return ", ".join(f"{a}{op}{b}={c}" for a, op, b, c in self.sums) + f". {self.stated()}"


class Arithmetic(SingleTurn):
    """The environment `arithmetic`: one turn, reward `correct`. With `easiest_terms` it has a curriculum."""

    difficulty: Callable[[], float]
    adapted: Callable[[Task, float], Task]
    observe: Callable[[Sequence[Group]], None]
    state: Callable[[], dict[str, Any]]
    load: Callable[[Mapping[str, Any]], None]

    def __init__(self, config: ArithmeticConfig) -> None:
        splits = {
            "train": problems(config, "train", config.train_tasks),
            "test": problems(config, "test", config.test_tasks),
        }
        super().__init__(splits, rewards={"correct": correct}, answer=boxed_integer)
        if config.easiest_terms:
            curriculum = PassRateCurriculum(config.easiest_terms, config.terms)
            self.difficulty, self.observe = curriculum.difficulty, curriculum.observe
            self.state, self.load, self.adapted = curriculum.state, curriculum.load, shortened


def problems(config: ArithmeticConfig, split: str, count: int) -> Sequence[Task]:
    """Return the tasks of a split."""

    def task(index: int) -> Task:
        draw = random.Random(derive_seed(config.seed, f"arithmetic-{split}", index))
        problem = make_problem(draw, split, config)
        return Task(problem.question, {"answer": problem.answer}, id=problem.expression)

    return GeneratedTasks(count, task)


def make_problem(draw: random.Random, split: str, config: ArithmeticConfig) -> Problem:
    """Return the first drawn chain that is in bounds and belongs to the split. Raises `DataError` if none is found."""
    for _ in range(MOST_DRAWS):
        total = draw.randint(1, config.largest_operand)
        expression, sums = str(total), []
        for _ in range(config.terms - 1):
            op, operand = draw.choice("+-"), draw.randint(1, config.largest_operand)
            after = total + operand if op == "+" else total - operand
            sums.append((total, op, operand, after))
            expression += f"{op}{operand}"
            total = after
        in_bounds = all(0 <= after <= config.largest_total for *_, after in sums)
        if in_bounds and held_out(expression) == (split == "test"):
            return Problem(expression, tuple(sums), draw.choice(PHRASINGS).format(expression))
    raise DataError(
        f"no chain for the split {split!r} was found among {MOST_DRAWS:,} with terms {config.terms}, largest_operand "
        f"{config.largest_operand} and largest_total {config.largest_total}; loosen one of them"
    )


def shortened(task: Task, terms: float) -> Task:
    """Return the task with the first numbers of its chain only."""
    parts = re.split(r"([+-])", task.id)[: 2 * int(terms) - 1]
    expression = "".join(parts)
    answer = int(parts[0]) + sum(int(op + operand) for op, operand in zip(parts[1::2], parts[2::2], strict=True))
    return Task(task.prompt[0].text.replace(task.id, expression), {"answer": str(answer)}, id=expression)


def correct(text: str, data: Mapping[str, Any]) -> float:
    """Return 1 if the last boxed number is the answer, else 0."""
    boxed = last_boxed(text)
    return float(boxed is not None and is_integer(boxed, data["answer"]))


def demonstrations(
    count: int, seed: int = 0, direct_share: float = 0.5, config: ArithmeticConfig | None = None
) -> Iterator[dict[str, Any]]:
    """Yield records for supervised fine-tuning, `{"messages": [...]}`.

    A share of `direct_share` only states the answer; the other records show the intermediate sums.
    """
    draw, config = random.Random(derive_seed(seed, "arithmetic-demonstrations")), config or ArithmeticConfig()
    for _ in range(count):
        problem = make_problem(draw, "train", config)
        answer = problem.stated() if draw.random() < direct_share else problem.worked()
        messages = (Message("user", problem.question), Message("assistant", answer))
        yield {"messages": [{"role": message.role, "content": message.text} for message in messages]}
