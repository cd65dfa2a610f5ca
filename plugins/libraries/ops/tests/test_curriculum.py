from typing import Any

import pytest

from whet.data.records import Episode, Group
from whet.errors import CheckpointError
from whet_ops.curriculum import PassRateCurriculum


def group(difficulty: float, rewards: list[float]) -> Group:
    episodes = [
        Episode("sums", 0, i, (), {"correct": reward}, reward, 1, difficulty=difficulty)
        for i, reward in enumerate(rewards)
    ]
    return Group(0, "sums", 0, tuple(episodes))


def test_the_difficulty_follows_the_pass_rate() -> None:
    curriculum = PassRateCurriculum(2, 4, up=0.75, down=0.25, window=2)
    assert curriculum.difficulty() == 2
    curriculum.observe([group(2, [1, 1]), group(2, [1, 0])])
    assert curriculum.difficulty() == 3
    curriculum.observe([group(2, [0, 0]), group(2, [0, 0])])  # played before it rose
    assert curriculum.difficulty() == 3
    curriculum.observe([group(3, [1, 0]), group(3, [1, 0]), group(3, [1, 1])])
    assert curriculum.difficulty() == 4
    curriculum.observe([group(4, [1, 1])] * 5)
    assert curriculum.difficulty() == 4
    curriculum.observe([group(4, [0, 0])] * 2)
    assert curriculum.difficulty() == 3


def test_a_resumed_curriculum_decides_as_if_it_had_never_stopped() -> None:
    groups = [group(2, [1, 1]), group(2, [1, 1]), group(2, [0, 1]), group(2, [1, 1]), group(3, [0, 0])] * 3
    straight = PassRateCurriculum(2, 9, window=3)
    straight.observe(groups)
    for cut in range(len(groups)):
        first, second = PassRateCurriculum(2, 9, window=3), PassRateCurriculum(2, 9, window=3)
        first.observe(groups[:cut])
        second.load(first.state())
        second.observe(groups[cut:])
        assert second.state() == straight.state()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lowest": 3, "highest": 2}, "lowest is 3 and highest is 2, wanted lowest <= highest"),
        ({"up": 0.2, "down": 0.2}, "down is 0.2 and up is 0.2, wanted 0 <= down < up <= 1"),
        ({"window": 0}, "window is 0, wanted at least 1 group"),
        ({"step": float("nan")}, "step is nan, wanted a number above 0"),
    ],
)
def test_bounds_that_cannot_hold_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"PassRateCurriculum: {message}"):
        PassRateCurriculum(**{"lowest": 1, "highest": 2, **wrong})


@pytest.mark.parametrize("state", [{}, {"difficulty": "high", "rates": []}, {"difficulty": 2, "rates": None}], ids=repr)
def test_the_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"PassRateCurriculum: the saved state is .*, wanted `difficulty` and"):
        PassRateCurriculum(1, 2).load(state)
