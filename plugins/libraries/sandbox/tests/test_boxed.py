import time

import pytest

from whet_sandbox.boxed import boxed_integer, is_integer, last_boxed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so \\boxed{17}", "17"),
        ("\\boxed{1} and then \\boxed{2}.", "2"),
        ("\\boxed{\\frac{1}{2}} is it", "\\frac{1}{2}"),
        ("\\boxed{}", ""),
        ("\\boxed{17", None),
        ("17", None),
        ("\\boxed 17", None),
    ],
)
def test_the_last_box_is_found_with_its_braces(text, found):
    assert last_boxed(text) == found


@pytest.mark.parametrize("text", ["17", " 17 ", "017", "-0", "0"])
def test_integers_are_compared_as_numbers(text):
    assert is_integer(text, str(int(text)))


@pytest.mark.parametrize(
    "text", ["", "-", "--17", "17.0", "1 7", "+17", "\uff11\uff17", "\u0661\u0667", "17\\n", "17,", "-17", "1e1"]
)
def test_what_is_no_integer_or_another_one_is_not_equal(text):
    assert not is_integer(text, "17")


def test_time_is_linear_in_the_text():
    begin = time.process_time()
    last_boxed("\\boxed{" * 200_000)
    last_boxed("\\boxed{" + "{" * 1_000_000)
    assert not is_integer("9" * 1_000_000, "17")
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{ 007 }", "7"),
        ("\\boxed{-0}", "0"),
        ("\\boxed{-12}", "-12"),
        ("\\boxed{7.0}", None),
        ("\\boxed{seven}", None),
        ("\\boxed{}", None),
        ("7", None),
        ("\\boxed{\u0667}", None),
    ],
)
def test_equal_integers_are_equal_answers(text, answer):
    assert boxed_integer(text) == answer
