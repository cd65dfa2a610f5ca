import re

import pytest

from whet.errors import DataError
from whet.interfaces.environment import Adaptive
from whet.interfaces.state import Stateful
from whet_data.generated import held_out
from whet_env_math.arithmetic import Arithmetic, correct, demonstrations, problems
from whet_env_math.config import ArithmeticConfig


def totals(expression: str) -> list[int]:
    """Work an expression out in another way than the generator does."""
    numbers = expression.replace("-", "+-").split("+")
    return [sum(map(int, numbers[: i + 1])) for i in range(len(numbers))]


def test_problems_stay_in_the_bounds_of_the_config():
    config = ArithmeticConfig(terms=4, largest_operand=5, largest_total=7)
    for task in problems(config, "train", 300)[:]:
        running = totals(task.id)
        assert len(running) == 4
        assert min(running) >= 0
        assert max(running) <= 7
        assert str(running[-1]) == task.data["answer"]
        assert task.prompt[0].text in (f"Compute {task.id}.", f"What is {task.id}?")


def test_no_expression_is_in_both_splits():
    environment = Arithmetic(ArithmeticConfig())
    assert not any(held_out(task.id) for task in environment.tasks("train")[:2000])
    assert all(held_out(task.id) for task in environment.tasks("test")[:])


def test_one_expression_in_ten_is_held_out():
    config = ArithmeticConfig(terms=3)
    share = sum(held_out(f"{a}+{b}-{c}") for a in range(1, 10) for b in range(1, 10) for c in range(1, 10)) / 729
    assert 0.06 < share < 0.14
    assert len(Arithmetic(config).tasks("test")) == 512


def test_a_million_tasks_cost_nothing_until_they_are_asked_for():
    tasks = Arithmetic(ArithmeticConfig()).tasks("train")
    assert len(tasks) == 1_000_000
    assert tasks[-1] == tasks[999_999] != tasks[0]


def test_another_seed_gives_other_tasks():
    one, two = (Arithmetic(ArithmeticConfig(seed=seed)).tasks("test")[:20] for seed in (0, 1))
    assert one != two


def test_bounds_that_leave_a_split_empty_are_refused():
    with pytest.raises(DataError, match="terms 2, largest_operand 1 and largest_total 1"):
        [problems(ArithmeticConfig(2, 1, 1), split, 9)[0] for split in ("train", "test")]


def test_only_the_last_box_counts():
    assert correct("\\boxed{3} no, \\boxed{17}", {"answer": "17"}) == 1.0
    assert correct("\\boxed{17} no, \\boxed{3}", {"answer": "17"}) == 0.0
    assert correct("17", {"answer": "17"}) == 0.0
    assert correct("\\boxed{17", {"answer": "17"}) == 0.0


def test_demonstrations_are_right_and_of_both_kinds():
    records = list(demonstrations(1000, seed=1))
    assert records == list(demonstrations(1000, seed=1)) != list(demonstrations(1000, seed=2))
    worked = 0
    for record in records:
        question, answer = (message["content"] for message in record["messages"])
        expression = question.removeprefix("Compute ").removeprefix("What is ").rstrip(".?")
        total = totals(expression)[-1]
        assert not held_out(expression)
        assert answer.endswith(f"\\boxed{{{total}}}")
        shown = answer.removesuffix(f"\\boxed{{{total}}}").rstrip(". ")
        worked += bool(shown)
        for left, _, right in (line.partition("=") for line in shown.split(", ") if shown):
            assert totals(left)[-1] == int(right)
    assert 440 < worked < 560
    assert [m["role"] for m in records[0]["messages"]] == ["user", "assistant"]
    assert all("," not in r["messages"][1]["content"] for r in demonstrations(50, direct_share=1.0))


def test_a_curriculum_begins_with_short_chains():
    config = ArithmeticConfig(terms=5, easiest_terms=2)
    environment = Arithmetic(config)
    assert isinstance(environment, Adaptive)
    assert isinstance(environment, Stateful)
    assert environment.difficulty() == 2
    for task in environment.tasks("train")[:50]:
        assert environment.adapted(task, 5.0) == task
        short = environment.adapted(task, 3.0)
        assert short.id == "".join(re.split("([+-])", task.id)[:5])
        assert str(totals(short.id)[-1]) == short.data["answer"]
        assert short.prompt[0].text in (f"Compute {short.id}.", f"What is {short.id}?")
    assert not isinstance(Arithmetic(ArithmeticConfig()), Adaptive)
    with pytest.raises(ValueError, match="is 7, wanted 0, or from 2 to terms, which is 5"):
        ArithmeticConfig(terms=5, easiest_terms=7)
