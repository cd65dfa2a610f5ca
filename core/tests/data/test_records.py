import numpy as np
import pytest

from whet.data.messages import Message
from whet.data.records import Episode, Group, Task


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
