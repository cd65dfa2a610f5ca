"""A call that comes by two ways is done once, and answered by both."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from whet.runtime.ways import Ways
from whet.runtime.wire import Buffer, decode, encode


class Noted:
    """What the driver and leaders hear, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, str]] = []
        self.ways = Ways(partial(self.note, "driver"))
        self.leader, self.another = partial(self.note, "leader"), partial(self.note, "another")

    def note(self, who: str, buffers: Sequence[Buffer]) -> None:
        message = decode(buffers)
        self.heard.append((who, message["number"], message["say"]))

    def answer(self, number: int, say: str = "done") -> list[tuple[str, int, str]]:
        """Answer, and give what has been heard since the last time."""
        self.ways.answer(number, say == "done", encode({"number": number, "say": say, "value": None}))
        return self.since()

    def since(self) -> list[tuple[str, int, str]]:
        heard, self.heard = self.heard, []
        return heard


def call(number: int, oldest: int | None = None, slot: int = 1) -> dict[str, Any]:
    return {"number": number, "slot": slot, **({} if oldest is None else {"once": oldest})}


def test_an_answer_goes_back_by_the_way_by_which_the_call_came() -> None:
    noted = Noted()
    assert noted.ways.admit(call(1), None)
    assert noted.ways.admit(call(2), noted.leader)
    assert noted.ways.admit(call(3, 3), None)
    assert noted.ways.admit(call(4, 3), noted.leader)
    assert [noted.answer(number) for number in (1, 2, 3, 4)] == [
        [("driver", 1, "done")], [("leader", 2, "done")], [("driver", 3, "done")], [("leader", 4, "done")],
    ]  # fmt: skip


def test_a_failure_is_told_to_the_driver_before_a_leader_waits_no_longer() -> None:
    noted = Noted()
    for number, oldest in ((1, None), (2, 2)):
        assert noted.ways.admit(call(number, oldest), noted.leader)
        assert noted.answer(number, "failed") == [("driver", number, "failed"), ("leader", number, "failed")]


def test_a_call_that_comes_again_while_it_is_under_way_is_answered_by_both_ways() -> None:
    noted = Noted()
    assert noted.ways.admit(call(1, 1), noted.leader)
    assert not noted.ways.admit(call(1, 1), None)
    assert noted.answer(1) == [("driver", 1, "done"), ("leader", 1, "done")]
    assert noted.ways.admit(call(2, 1), None)
    assert not noted.ways.admit(call(2, 1), noted.leader)
    assert noted.answer(2) == [("driver", 2, "done"), ("leader", 2, "done")]


def test_one_that_comes_again_when_it_is_over_gets_the_same_answer() -> None:
    noted = Noted()
    for number, said in ((1, "done"), (2, "failed")):
        assert noted.ways.admit(call(number, 1), noted.leader)
        noted.answer(number, said)
        assert not noted.ways.admit(call(number, 1), None)
        assert noted.since() == [("driver", number, said)]


def test_what_is_older_than_all_that_is_open_is_forgotten_and_not_done_when_it_comes_late() -> None:
    noted = Noted()
    assert noted.ways.admit(call(1, 1), None)
    noted.answer(1)
    assert noted.ways.admit(call(7, 7), None)
    assert list(noted.ways._calls) == [7]
    assert not noted.ways.admit(call(1, 1), noted.leader)
    assert not noted.ways.admit(call(2, 1), noted.leader), "it never came, but nobody waits for it any more"
    assert noted.since() == [("leader", 1, "failed"), ("leader", 2, "failed")]
    assert noted.ways.admit(call(3, 1, slot=2), None), "another spawn"


def test_a_spawn_that_closes_is_forgotten_when_it_has_answered() -> None:
    noted = Noted()
    for slot in (1, 2):
        noted.ways.admit(call(slot, 1, slot), None)
        noted.ways.admit(call(slot + 10, 1, slot), noted.leader)
        noted.answer(slot)
    noted.ways.close(1)
    assert sorted(noted.ways._calls) == [2, 11, 12]
    assert noted.answer(11) == [("leader", 11, "done")]
    assert sorted(noted.ways._calls) == [2, 12]
