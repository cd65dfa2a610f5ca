import pytest

from whet.data.records import Task
from whet_data.generated import GeneratedTasks, held_out


def squares(count: int, made: list[int]) -> GeneratedTasks:
    def make(index: int) -> Task:
        made.append(index)
        return Task(f"{index}*{index}", {"answer": str(index * index)})

    return GeneratedTasks(count, make)


def test_tasks_are_made_on_access_and_not_before():
    made: list[int] = []
    tasks = squares(1_000_000_000, made)
    assert len(tasks) == 1_000_000_000
    assert made == []
    assert tasks[-1] == tasks[999_999_999]
    assert made == [999_999_999, 999_999_999]


def test_they_are_indexed_as_a_list_is():
    some = squares(7, [])
    as_list = [some[i] for i in range(7)]
    assert list(some) == as_list
    for part in (slice(None), slice(2, 5), slice(None, None, -2), slice(5, 99), slice(9, 20)):
        assert some[part] == as_list[part]
    for wrong in (7, -8):
        with pytest.raises(IndexError):
            some[wrong]


def test_one_in_ten_is_held_out():
    assert 0.09 < sum(held_out(f"task {i}") for i in range(10_000)) / 10_000 < 0.11
