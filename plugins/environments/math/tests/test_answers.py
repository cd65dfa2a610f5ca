import re
import time
from fractions import Fraction

import pytest

from whet_env_math.answers import given_answer, gold_answer, is_bomb, normal_answer, plain_amount, plain_number
from whet_testing.hostile import HOSTILE_ANSWERS


@pytest.mark.parametrize(
    ("field", "pattern", "gold"),
    [
        ("2+2=<<2+2=4>>4\n#### 4", None, "4"),
        ("a #### 3\n#### 1,450", None, "1,450"),
        ("so it is $\\boxed{\\frac{1}{2}}$.", None, "\\frac{1}{2}"),
        ("x^2", None, "x^2"),
        (" ", None, None),
        ("so\nA: 18\n", r"^A: (.*)$", "18"),
        ("so\nB: 18\n", r"^A: (.*)$", None),
    ],
)
def test_the_right_answer_is_found_in_its_field(field, pattern, gold):
    assert gold_answer(field, re.compile(pattern, re.MULTILINE) if pattern else None) == gold


@pytest.mark.parametrize(
    ("text", "boxed_only", "answer"),
    [
        ("\\boxed{1} no, \\boxed{2}", False, "\\boxed{2}"),
        ("The answer is 18.", False, "The answer is 18."),
        ("The answer is 18.", True, None),
        ("", False, None),
        (" \n ", False, None),
        ("\\boxed{}", False, None),
        ("\\boxed{" + "1" * 2000 + "}", False, None),
        ("18 " + " " * 500 + "so\n\n 19", False, "so 19"),
    ],
)
def test_what_a_model_answered_is_found(text, boxed_only, answer):
    assert given_answer(text, boxed_only) == answer


@pytest.mark.parametrize("bomb", ["9**9**9", "9^{9^{9}}", "10^{100000000}", "9^{-1000000}", "((9!)!)!", "9^ {9^9}"])
def test_numbers_that_nobody_can_write_down_are_known(bomb):
    assert is_bomb(bomb)


@pytest.mark.parametrize(
    "answer", ["x^2+3x^{10}", "2^{2023}", "\\frac{n!}{k!(n-k)!}", "(x^2)^3", "1.5", "e^{-x^2}", "2^{n^2}"]
)
def test_ordinary_answers_are_no_bombs(answer):
    assert not is_bomb(answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        (" -3.50 ", Fraction(-7, 2)),
        ("1,450", 1450),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("$18", 18),
        ("\\$18.", 18),
        ("007", 7),
        ("1,45", None),
        ("18%", None),
        ("x", None),
        ("1e5", None),
        ("\uff11\uff12", None),
        ("9" * 31, None),
        ("", None),
        ("-", None),
    ],
)
def test_plain_numbers_are_read_and_nothing_else(text, number):
    assert plain_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18 dollars", 18), ("12 months", 12), ("1 point", 1), ("4 square feet", 4), ("3 pairs of baths", 3),
        ("7 dozens of eggs", 7), ("3 fourths", None), ("3 eggs fourths", None),
        ("2 elevenths", None), ("3 sixteenths", None), ("2 twentieths", None), ("5 point five", None),
        ("8 choose three", None), ("10 base two", None), ("101 binary", None), ("7 remainder three", None),
        ("6 doubled", None), ("5 double", None), ("5 divided", None), ("9 negative", None), ("18 per cent", None),
    ],
)  # fmt: skip
def test_words_after_a_number_are_a_unit_unless_they_change_it(text, number):
    assert plain_amount(text) == number


def test_hostile_answers_cost_no_time():
    begin = time.process_time()
    for text in [*HOSTILE_ANSWERS.values(), "^" * 10_000, "^{" * 10_000, "1" * 1_000_000, "1," * 500_000, "^1" * 500]:
        for answer in (given_answer(text, False), given_answer(text, True)):
            if answer is not None:
                assert len(answer) < 1100
                is_bomb(answer)
        plain_number(text)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("text", "boxed_only", "answer"),
    [
        ("\\boxed{1,450.0}", False, "1450"),
        ("\\boxed{ \\$1450 }", True, "1450"),
        ("\\boxed{-3.50}", True, "-7/2"),
        ("\\boxed{\\dfrac{1}{2}}", True, "\\frac{1}{2}"),
        ("\\boxed{\\left( 1,\\; 2 \\right)}", True, "(1,2)"),
        ("\\boxed{\\leftarrow}", True, "\\leftarrow"),
        ("\\boxed{1} or \\boxed{x + 1}", True, "x+1"),
        ("it was 12, so it is 1,450.", False, "1450"),
        ("it is 42.", True, None),
        ("no idea", False, None),
        ("\\boxed{}", False, None),
        ("\\boxed{" + "x" * 2000 + "}", False, None),
    ],
)
def test_answers_are_voted_on_in_one_spelling(text, boxed_only, answer):
    assert normal_answer(text, boxed_only) == answer


@pytest.mark.parametrize("what", HOSTILE_ANSWERS)
def test_the_spelling_of_a_hostile_answer_is_found_in_linear_time(what):
    begin = time.process_time()
    normal_answer(HOSTILE_ANSWERS[what] * 5, False)
    assert time.process_time() - begin < 1.0
