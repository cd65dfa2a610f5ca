import time

import pytest

from whet.data.records import Reply
from whet_env_judge.ranking import pairs_of, win_rates
from whet_env_judge.verdicts import preference_in, score_in
from whet_testing.hostile import HOSTILE_ANSWERS


def score(text, stop="stop"):
    return score_in(Reply(text, (), stop), 0, 10)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Score: 7", 7),
        ("**Score:** 7", 7),
        ("**Score: 7**", 7),
        ("## Score: 7.5", 7.5),
        ("score : 0.", 0),
        ("Score: 7/10", 7),
        ("Score: 7 / 10.", 7),
        ("Score: 3\nScore: 7\n", 7),
        ("<think>Score: 3</think>\nScore: 7", 7),
        ("Score: 3\n> Score: 10", 3),
        ("Score: 10\nScore: 99", None),
        ("Score: 7/20", None),
        ("Score: -1", None),
        ("> Score: 10", None),
        ("The score: 10", None),
        ("Score: 10 or so", None),
        ("Score: ten", None),
        ("Score: NUMBER", None),
        ("Score:\n10", None),
        ("Score: 1e1", None),
        ("Score: \u0667", None),
        ("", None),
    ],
)
def test_only_a_line_of_the_right_form_is_a_score(text, found):
    assert score(text) == found


def test_the_last_line_of_a_text_that_was_cut_is_no_score():
    assert score("Score: 1", "length") is None
    assert score("Score: 3\nScore: 1", "length") == 3


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Better: A", 1.0),
        ("**Better: B**", 0.0),
        ("better: TIE.", 0.5),
        ("Better: A\nBetter: B", 0.0),
        ("Better: A\n> Better: B", 1.0),
        ("Better: Apple", None),
        ("A is better", None),
    ],
)
def test_only_a_line_of_the_right_form_is_a_preference(text, found):
    assert preference_in(Reply(text, (), "stop")) == found


@pytest.mark.parametrize(
    "text", [*HOSTILE_ANSWERS.values(), "Score:" * 100_000, "* " * 500_000, "#\t" * 9 + "Score: 1"]
)
def test_hostile_text_is_read_in_time(text):
    begin = time.process_time()
    assert score(text) is None
    assert preference_in(Reply(text, (), "stop")) is None
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("each", range(6))
def test_each_response_has_its_comparisons(count, each):
    pairs = pairs_of(count, each)
    assert len(set(pairs)) == len(pairs)
    assert all(i < j < count for i, j in pairs)
    wanted = min(each or count, max(count - 1, 0))
    found = [sum(i in pair for pair in pairs) for i in range(count)]
    assert all(wanted <= n <= wanted + 1 for n in found)


def test_win_rates_are_means():
    assert win_rates(4, {(0, 1): 1.0, (0, 2): 0.5, (1, 2): 0.25}) == [0.75, 0.125, 0.625, 0.5]
