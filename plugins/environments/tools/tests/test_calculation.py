import time

import pytest

from whet_env_tools.calculation import calculate, called
from whet_testing.hostile import HOSTILE_ANSWERS


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("calc 47*83", "3901"),
        (" calc 47 * 83 \n", "3901"),
        ("I shall ask.\ncalc 12-47", "-35"),
        ("calc 0+7", "7"),
        ("calc 999999999999*999999999999", "999999999998000000000001"),
    ],
)
def test_calls_are_answered(text, result):
    assert called(text) == result


@pytest.mark.parametrize(
    "text",
    [
        "",
        "calc",
        "calc ",
        "47*83",
        "calc 47*83\nand so",
        "so calc 47*83",
        "calc 47*",
        "calc 4*7*8",
        "calc -4*7",
        "calc 4**7",
        "calc 4^7",
        "calc 47/83",
        "calc 1e9*2",
        "calc 4_7*8",
        "calc 9999999999999*1",
        "calc \uff14*\u0667",
        "calc __import__('os').abort()",
        "calc 47*83; 1",
    ],
)
def test_what_is_no_call_gets_no_answer(text):
    assert called(text) is None


def test_hostile_text_costs_no_time():
    begin = time.process_time()
    for text in [*HOSTILE_ANSWERS.values(), "calc " + "9" * 1_000_000 + "*2", "calc " * 200_000, "\n" * 1_000_000]:
        assert called(text) is None
        assert calculate(text) is None
    assert time.process_time() - begin < 1
