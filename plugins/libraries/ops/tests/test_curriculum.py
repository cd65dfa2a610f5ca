from typing import Any

import pytest

from whet.data.records import Episode, Group
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


@pytest.mark.parametrize("wrong", [{"lowest": 3, "highest": 2}, {"up": 0.2, "down": 0.2}, {"window": 0}, {"step": 0.0}])
def test_bounds_that_cannot_hold_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wanted lowest <= highest"):
        PassRateCurriculum(**{"lowest": 1, "highest": 2, **wrong})
