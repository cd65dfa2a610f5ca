"""Answers as models write them, against golds that math-verify itself parses."""

import math_verify
import pytest

from whet_env_math import verifier
from whet_env_math.answers import given_answer


def equal(text: str, gold: str) -> bool:
    answer = given_answer(text, boxed_only=False)
    return answer is not None and verifier.equal(answer, gold)


BOLD = [
    ("The answer is **42**.", "42"),
    ("**Answer:** 250000", "250000"),
    ("**Answer: 250,000**", "250000"),
    ("There are **3** apples and 4 pears, so 7.", "7"),
    ("It is ***42***", "42"),
    ("It is *42*, I think.", "42"),
    ("It is __42__.", "42"),
    ("It is `42`.", "42"),
    ("**42**", "42"),
    ("So it is **42", "42"),
    ("**Answer**: **1/2**", "0.5"),
    ("**-3.5**", "-3.5"),
    ("\\boxed{**42**}", "42"),
    ("So x_1 = **3** and x_2 = **4**, so **7**", "7"),
    ("So 6 - 2 = **4** and *that's it*", "4"),
    ("**Step 1:** 3*4 = **12**\n**Step 2:** 12+5 = **17**\n\n**Final Answer: 17**", "17"),
]
LISTS = [
    ("## Answer\n\n42", "42"),
    ("### Final answer\n**$1,450**", "1450"),
    ("- total 12\n- 7 left\n\nSo she has *5* left.", "5"),
    ("- 12\n- 7", "7"),
    ("* 12\n* 700", "700"),
    ("12\n\n700", "700"),
    ("1. 3 apples\n2. 7 pears", "7"),
    ("> 42", "42"),
    ("| Total | **42** |", "42"),
    ("The answer is:\n18. I hope it is correct.", "18"),
]
FORMULAS = [
    ("The answer is \\(\\frac{1}{2}\\).", "0.5"),
    ("Therefore, the answer is **\\(42\\)**.", "42"),
    ("so $\\frac12$", "0.5"),
    ("So **$x = 5$**", "5"),
    ("That is $**18**$.", "18"),
    ("$$\nx = 42\n$$", "42"),
    ("\\[ x = 42 \\]", "42"),
    ("\\[\n\\boxed{42}\n\\]", "42"),
    ("$5 + 3 = 8$", "8"),
    ("The final answer is $\\boxed{42}$. I hope it is correct.", "42"),
    ("It is 2**10", "1024"),
    ("It is 2 ** 10", "1024"),
    ("\\boxed{2^{10}}", "1024"),
]
UNITS = [
    ("She pays $5 for tea and $13 for food, so $18 in total.", "18"),
    ("It costs **$5** per hour for **3** hours: **$15**.", "15"),
    ("**Total: $2,125.00**", "2125"),
    ("The total is \\$18.50.", "18.5"),
    ("\\boxed{\\$1,450}", "1450"),
    ("Answer: 1,234,567", "1234567"),
    ("It is 25%.", "25\\%"),
    ("It is **25%**.", "0.25"),
    ("It takes **42 hours**.", "42"),
    ("so **5** m/s", "5"),
    ("It is $\\dfrac{3}{4}$ cups", "0.75"),
    ("**Answer:** \n\n**42** apples", "42"),
]
AROUND = [
    ("10^{1000000} is huge. The answer is 7", "7"),
    ("9**9**9 is huge. The answer is 7", "7"),
]


@pytest.mark.parametrize(("text", "gold"), [*BOLD, *LISTS, *FORMULAS, *UNITS, *AROUND])
def test_a_right_answer_is_right_however_a_model_writes_it(text, gold):
    assert equal(text, gold)


@pytest.mark.parametrize(("text", "gold"), [*BOLD, *LISTS, *FORMULAS, *UNITS, *AROUND])
def test_a_wrong_answer_stays_wrong(text, gold):
    assert not equal(text, f"{gold}+1000")


@pytest.mark.parametrize("text", ["so it is 9**9**9**9", "Answer: 10^1000000", "it is $9^{9^{9}}$"])
def test_a_number_that_nobody_can_write_down_is_not_evaluated(text, monkeypatch):
    def refuse(*_):
        raise AssertionError("it would be evaluated")

    monkeypatch.setattr(verifier, "extract_match", refuse)
    assert not equal(text, "7")


PLAIN = [
    "The answer is 42.", "so \\boxed{\\frac{1}{2}}", "it is $x^2+1$", "x = 3 or 4", "Answer: 1/2", "so 3 * 4 * 5 = 60",
    "no number at all", "\\boxed{}", "\\boxed{\\begin{}", "\\boxed{\\{1, 2\\}}", "final answer is $7$ I hope",
    "between \\(1\\) and \\(2\\)", "\\boxed{(1, 2]}", "\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "50 percent",
    "-1.5e3", "12 and 700",
]  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_formulas_are_found_as_math_verify_finds_them(text):
    expected = math_verify.parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    assert list(map(str, verifier._parsed_answer(text))) == list(map(str, expected))
