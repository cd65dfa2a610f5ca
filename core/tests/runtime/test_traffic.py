import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from whet.runtime.channel import Line, receive, send
from whet.runtime.traffic import Traffic
from whet_testing.contracts.workers import wait_until


class End:
    """One line with what came over it, and the other end of its socket."""

    def __init__(self, traffic: Traffic, take: Callable[[bytes], None] | None = None) -> None:
        self.here, self.there = socket.socketpair()
        self.there.settimeout(20.0)
        self.came: list[bytes] = []
        self.threads: set[int] = set()
        self.broke: list[str] = []
        self._also = take or (lambda message: None)
        self.line = Line(traffic, self._take, self.broke.append)

    def _take(self, buffers: list[memoryview]) -> None:
        self.came.append(b"".join(buffers))
        self.threads.add(threading.get_ident())
        self._also(self.came[-1])


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    traffic = Traffic()
    yield traffic
    traffic.stop()


@pytest.fixture
def end(traffic: Traffic) -> Iterator[End]:
    end = End(traffic)
    end.line.open(end.here)
    yield end
    end.there.close()


def test_messages_of_all_lines_are_taken_on_one_thread(traffic: Traffic) -> None:
    ends = [End(traffic) for _ in range(20)]
    for number, end in enumerate(ends):
        end.line.open(end.here)
        send(end.there, [bytes([number]), b"!"])
    wait_until(lambda: all(end.came for end in ends), "all have come")
    assert [end.came for end in ends] == [[bytes([number]) + b"!"] for number in range(20)]
    assert len(set().union(*(end.threads for end in ends))) == 1
    for end in ends:
        end.there.close()


def test_what_is_sent_before_a_line_is_open_goes_first(traffic: Traffic) -> None:
    end = End(traffic)
    end.line.send([b"first", bytes(3_000_000)])
    end.line.send([b"second"])
    end.line.open(end.here)
    end.line.send([b"third"])
    with end.there:
        assert [bytes(receive(end.there)[0]) for _ in range(3)] == [b"first", b"second", b"third"]


def test_a_small_message_is_on_its_way_when_send_returns(end: End) -> None:
    end.line.send([b"now"])
    end.there.setblocking(False)
    assert b"now" in end.there.recv(100)


def test_sending_never_waits_for_who_does_not_read_and_others_are_served(traffic: Traffic, end: End) -> None:
    other = End(traffic)
    other.line.open(other.here)
    large = [bytes([n]) * 4_000_000 for n in range(3)]
    for buffer in large:
        end.line.send([buffer])
    with other.there:
        send(other.there, [b"meanwhile"])
        wait_until(lambda: other.came == [b"meanwhile"], "the other line is served")
    assert [bytes(receive(end.there)[0]) for _ in large] == large


def test_messages_of_several_senders_stay_whole_where_the_reader_is_slow(end: End) -> None:
    sizes = [1, 100_000, 700, 400_000]

    def speak(letter: int) -> None:
        for size in sizes * 5:
            end.line.send([bytes([letter]) * size])

    threads = [threading.Thread(target=speak, args=(letter,)) for letter in range(6)]
    for thread in threads:
        thread.start()
    arrived = [bytes(receive(end.there)[0]) for _ in range(6 * 20)]
    for thread in threads:
        thread.join()
    for letter in range(6):
        assert [len(m) for m in arrived if m[0] == letter] == sizes * 5
    assert all(len(set(message)) == 1 for message in arrived)


def test_what_was_said_before_the_end_is_taken_and_then_the_end_is_told(end: End) -> None:
    for n in range(50):
        send(end.there, [bytes([n])])
    end.there.close()
    assert end.line.over.wait(20.0)
    assert end.came == [bytes([n]) for n in range(50)]
    assert end.broke == ["its process closed the connection to the driver"]


def test_an_answer_before_a_damaged_one_counts(end: End) -> None:
    with contextlib.closing(end.there):
        send(end.there, [b"good"])
        end.there.sendall(b"this is no message")
        assert end.line.over.wait(20.0)
    assert end.came == [b"good"]
    assert "no proper answer: a message is damaged" in end.broke[0]


def test_a_line_whose_messages_cannot_be_taken_breaks_alone(traffic: Traffic, end: End) -> None:
    def refuse(message: bytes) -> None:
        raise RuntimeError("not this one")

    bad = End(traffic, refuse)
    bad.line.open(bad.here)
    with bad.there:
        send(bad.there, [b"x"])
        assert bad.line.over.wait(20.0)
    assert "RuntimeError: not this one" in bad.broke[0]
    send(end.there, [b"y"])
    wait_until(lambda: end.came == [b"y"], "the other line is served")


def test_a_line_that_closes_ends_its_socket_whatever_waits(end: End) -> None:
    end.line.send([bytes(8_000_000)])
    end.line.close()
    assert end.line.over.wait(20.0)
    with pytest.raises(EOFError):
        receive(end.there)
    end.line.send([b"into the void"])


def test_stopping_closes_all_lines_and_one_that_opens_later(traffic: Traffic, end: End) -> None:
    late = End(traffic)
    threads = threading.active_count()
    traffic.stop()
    traffic.stop()
    wait_until(lambda: threading.active_count() < threads, "its thread is gone")
    late.line.open(late.here)
    for stopped in (end, late):
        assert stopped.there.recv(1) == b""
        assert stopped.line.over.is_set()
        assert not stopped.broke
    late.there.close()


def test_a_thread_without_traffic_sleeps(end: End) -> None:
    send(end.there, [bytes(5_000_000)])
    end.line.send([bytes(5_000_000)])
    receive(end.there)
    wait_until(lambda: bool(end.came), "it has come")
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25
