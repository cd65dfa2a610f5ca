import numpy as np
import pytest

from whet.data.messages import Message
from whet.data.records import Episode, Group, Sampling, Task, gold_answer, recordable
from whet.errors import DataError


def test_a_task_takes_its_prompt_as_people_write_it():
    assert Task("2+2?", {"answer": "4"}) == Task((Message("user", "2+2?"),), {"answer": "4"})


def test_records_do_not_change():
    with pytest.raises(AttributeError):
        Task("2+2?").id = "x"  # type: ignore[misc]


def test_the_rewards_of_a_group_are_those_of_its_episodes_in_order():
    episodes = tuple(Episode("e", 0, i, (), {"right": r}, r, 1) for i, r in enumerate((1.0, 0.0, 0.5)))
    rewards = Group(0, "e", 0, episodes).rewards
    assert rewards.tolist() == [1.0, 0.0, 0.5]
    assert rewards.dtype == np.float32


@pytest.mark.parametrize(
    ("data", "gold"),
    [
        ({}, None),
        ({"answer": "4", "hint": "even"}, "4"),
        ({"answer": 4}, "4"),
        ({"answer": None}, "null"),
        ({"answer": ["4", "four"]}, '["4", "four"]'),
        ({"number": 3, "word": "\u202eabc"}, '{"number": 3, "word": "\u202eabc"}'),
        ({"answer": "x" * 2_500}, "x" * 2_000 + " [500 more characters]"),
        ({"answer": {1, }}, "\"{1}\""),
    ],
)  # fmt: skip
def test_the_right_answer_of_a_task_is_text_of_a_bounded_length(data, gold):
    assert gold_answer(Task("2+2?", data)) == gold


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0}, {"max_tokens": 2.5}, {"max_tokens": "3"}, {"max_tokens": True},
        {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": -1},
        {"stop": "END"}, {"stop": [1]}, {"stop": [b"a"]}, {"stop": [""]},
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_sampling_that_mean_nothing_are_named(settings):
    (name,) = settings
    with pytest.raises(DataError, match=name):
        Sampling(**settings)


def test_what_json_does_not_know_is_recorded_as_null():
    assert recordable([float("nan"), 1.5, np.array([-np.inf, 2.0])]) == [None, 1.5, [None, 2.0]]
    Sampling(max_tokens=np.int64(3))
