import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from whet.runtime.channel import Incoming, frame, receive, send
from whet.runtime.wire import WireError


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def send_from_thread(end: socket.socket, buffers: list[bytes]) -> None:
    threading.Thread(target=send, args=(end, buffers), daemon=True).start()


@pytest.mark.parametrize("sizes", [[], [0], [1], [0, 0, 5], [63, 64, 65], [200_000, 0, 7], [1] * 2000, [70_000] * 700])
def test_buffers_arrive_as_they_left_and_aligned(pair: tuple[socket.socket, socket.socket], sizes: list[int]) -> None:
    buffers = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    send_from_thread(pair[0], buffers)
    arrived = receive(pair[1])
    assert [bytes(buffer) for buffer in arrived] == buffers
    assert all(np.frombuffer(b, np.uint8).ctypes.data % 64 == 0 for b in arrived if len(b))


def test_messages_arrive_one_after_the_other(pair: tuple[socket.socket, socket.socket]) -> None:
    for n in range(3):
        send(pair[0], [bytes([n])])
    assert [bytes(receive(pair[1])[0]) for _ in range(3)] == [b"\0", b"\1", b"\2"]


def test_an_end_that_is_gone_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"WHT1\1\0")
    pair[0].close()
    with pytest.raises(EOFError):
        receive(pair[1])


def test_what_is_no_message_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"hello, worker\n")
    with pytest.raises(WireError):
        receive(pair[1])


def test_more_buffers_than_a_message_of_its_limit_can_have_are_refused_before_they_are_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].sendall(b"WHT1" + struct.pack("<I", 20_000))
    with pytest.raises(WireError, match="no proper beginning"):
        receive(pair[1], limit=1 << 20)


def test_an_announcement_above_the_limit_is_refused_before_memory_is_taken(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].sendall(b"WHT1" + struct.pack("<I2Q", 2, 1 << 62, (1 << 64) - 1))
    with pytest.raises(WireError, match="was announced"):
        receive(pair[1], limit=1 << 20)


def test_a_sender_that_trickles_does_not_outlast_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    stop = threading.Event()

    def trickle() -> None:
        pair[0].sendall(b"WHT1" + struct.pack("<IQ", 1, 1000))
        while not stop.wait(0.02):
            pair[0].sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        receive(pair[1], deadline=begin + 0.2)
    stop.set()
    thread.join()
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize("step", [1, 7, 64, 1000, 1 << 16])
def test_messages_are_put_together_from_whatever_comes_at_once(
    pair: tuple[socket.socket, socket.socket], step: int
) -> None:
    wanted = [[], [b""], [b"x"], [b"a" * 63, b"", b"b" * 65], [b"c"] * 40, [bytes(range(256)) * 12], []]
    stream = b"".join(bytes(piece) for buffers in wanted for piece in frame(buffers))
    incoming, scratch, arrived = Incoming(), memoryview(bytearray(1 << 12)), []
    for begin in range(0, len(stream), step):
        part = stream[begin : begin + step]
        pair[0].sendall(part)
        pair[1].setblocking(False)
        with suppress(BlockingIOError):
            while True:
                arrived += list(incoming.receive(pair[1], scratch))
    scratch[:] = bytes(len(scratch))
    assert [[bytes(buffer) for buffer in message] for message in arrived] == wanted
    filled = [np.frombuffer(buffer, np.uint8) for message in arrived for buffer in message if len(buffer)]
    assert all(array.ctypes.data % 64 == 0 and array.flags.writeable for array in filled)


def test_a_large_payload_is_received_where_it_stays(pair: tuple[socket.socket, socket.socket]) -> None:
    sent = np.random.default_rng(0).integers(0, 256, 30_000_000, np.uint8)
    send_from_thread(pair[0], [b"head", sent.data, b"tail"])
    incoming, scratch = Incoming(), memoryview(bytearray(1 << 10))
    arrived: list[list[memoryview]] = []
    while not arrived:
        arrived += list(incoming.receive(pair[1], scratch))
    head, large, tail = arrived[0]
    assert (bytes(head), bytes(tail)) == (b"head", b"tail")
    assert np.array_equal(np.frombuffer(large, np.uint8), sent)


def test_what_comes_in_pieces_is_refused_as_what_comes_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"WHT1" + struct.pack("<I2Q", 2, 1 << 62, (1 << 64) - 1))
    with pytest.raises(WireError, match="was announced"):
        list(Incoming(limit=1 << 20).receive(pair[1], memoryview(bytearray(100))))
    pair[0].sendall(b"hello, worker\n")
    with pytest.raises(WireError, match="no proper beginning"):
        list(Incoming().receive(pair[1], memoryview(bytearray(100))))
    pair[0].close()
    with pytest.raises(EOFError):
        list(Incoming().receive(pair[1], memoryview(bytearray(100))))
