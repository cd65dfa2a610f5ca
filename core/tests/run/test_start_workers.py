"""Roles that share nothing start at the same time."""

import threading

import pytest

from whet.plan.placement import RolePlan
from whet.run.start_workers import build_groups, start_roles


class Handle:
    def __init__(self, role: str) -> None:
        self.role = role

    def close(self) -> None:
        """Hold nothing."""


def place(role: str, processes: str, *devices: str) -> RolePlan:
    return RolePlan(role, "x", len(devices), 1, devices, processes)


def test_roles_that_share_processes_or_a_device_are_in_one_lane():
    places = [
        place("backend", "backend+critic", "cuda:0,1"),
        place("generator", "generator", "cpu"),
        place("critic", "backend+critic", "cuda:0"),
        place("teacher", "teacher", "cuda:2"),
        place("judge", "judge", "cuda:1"),
        place("other", "other", "cpu"),
    ]
    assert build_groups(places) == [["backend", "critic", "judge"], ["generator"], ["teacher"], ["other"]]


def test_lanes_that_meet_through_a_third_are_one():
    assert build_groups(
        [place("a", "a", "cuda:0"), place("b", "b", "cuda:1"), place("c", "c", "cuda:0", "cuda:1")]
    ) == [["a", "b", "c"]]


def test_lanes_start_at_the_same_time():
    together = threading.Barrier(2)
    closers: list[object] = []

    def build(role: str) -> Handle:
        together.wait(60.0)
        return Handle(role)

    found = start_roles(["a", "b"], [["a"], ["b"]], build, closers)
    assert {role: handle.role for role, handle in found.items()} == {"a": "a", "b": "b"}
    assert closers == [found["a"].close, found["b"].close]


def test_of_several_that_fail_the_first_is_told_and_what_follows_in_a_lane_is_not_begun():
    begun, failed = [], threading.Event()

    def build(role: str) -> str:
        begun.append(role)
        if role == "c":
            failed.set()
            raise ValueError("c")
        assert failed.wait(60.0)
        if role == "a":
            raise ValueError("a")
        return Handle(role)

    closers: list[object] = []
    with pytest.raises(ValueError, match="a"):
        start_roles(["a", "b", "c", "d"], [["a", "b"], ["c"], ["d"]], build, closers)
    assert "b" not in begun
    assert len(closers) <= 1
