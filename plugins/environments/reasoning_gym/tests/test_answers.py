"""What counts as an answer, and which answers are programs."""

import random

import pytest

from whet_env_reasoning_gym.answers import extracted
from whet_env_reasoning_gym.inside.guards import is_program

SAMPLES = [
    "<answer>4</answer>", "<answer> 4\n</answer>", "a<answer>3</answer>b<answer>4</answer>", "<answer>4", "4", "",
    "<answer></answer>", "<answer>3<answer>4</answer>", "</answer><answer>4</answer>", "<answer>1</answer></answer>",
]  # fmt: skip


def test_the_last_closed_answer_counts():
    assert [extracted(text) for text in SAMPLES] == ["4", "4", "4", None, None, None, "", "3<answer>4", "4", "1"]


def test_answers_are_those_that_the_library_extracts():
    utils = pytest.importorskip("reasoning_gym.utils", reason="reasoning-gym is not installed")
    draw = random.Random(0)
    parts = ["<answer>", "</answer>", " ", "\n", "4", "x", "<answer", ">"]
    texts = ["".join(draw.choices(parts, k=draw.randrange(12))) for _ in range(3000)]
    assert [extracted(text) for text in SAMPLES + texts] == [utils.extract_answer(text) for text in SAMPLES + texts]


def test_many_tags_that_are_not_closed_are_read_in_linear_time():
    assert extracted("<answer>" * 200_000) is None


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('true')", "exec(chr(65))", "(exec)(chr(65))", "[exec][0](chr(65))", "exec  (chr(65))",
        "ｅｘｅｃ(chr(65))", "exec\\\n(1)", "exec#\n(1)", "(lambda: 1)()", "1 if 0 else exec(chr(65))", "x.func(1)",
        "open(chr(65))", "sin(exec(chr(65)))", "exec!(1)", "{exec}(1)", "[f(1) for f in (exec, 1)]",
    ],
)  # fmt: skip
def test_a_formula_that_calls_anything_but_mathematics_is_a_program(answer):
    for name in (
        "countdown",
        "puzzle24",
        "polynomial_multiplication",
        "simple_integration",
        "intermediate_integration",
    ):
        assert is_program(name, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "82 + 20 + 67 - 50", "(3 + 4) * (5 - 1)", "2*x**3 - 4*x + C", "x*sin(x)/2 + cos(x) + C", "exp(2*x)*(x - 1)",
        "log(Abs(x)) + sqrt(x)", "5!", "1.5*x", "-x", "0.5 * (2)", "x and (y)",
    ],
)  # fmt: skip
def test_a_formula_is_no_program(answer):
    assert not is_program("simple_integration", answer)


@pytest.mark.parametrize(
    "answer",
    [
        "exit()", "oracle_answer", "answer", "[oracle_answer]", "entry['answer']", "oracle_answer.strip()", "[f(1)]",
        "[x for x in y]", "f'{oracle_answer}'", "(lambda: 1)()", "[*oracle_answer]",
    ],
)  # fmt: skip
def test_a_list_that_holds_names_or_calls_is_a_program(answer):
    for name in ("binary_matrix", "spiral_matrix", "string_insertion", "n_queens"):
        assert is_program(name, answer)


@pytest.mark.parametrize(
    "answer", ["0 1\n1 0", "[[0, 1], [1, 0]]", "['A', 'B']", "ABCDE", "1 2 3", "_ Q\nQ _", "-1", ""]
)
def test_plain_data_are_no_program(answer):
    for name in ("binary_matrix", "spiral_matrix", "string_insertion", "n_queens"):
        assert not is_program(name, answer)


def test_scorers_that_compare_text_see_any_answer():
    assert not is_program("spell_backward", "exec(chr(65))")
