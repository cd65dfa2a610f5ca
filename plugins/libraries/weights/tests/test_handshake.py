"""Only who knows the run's token comes in, and nobody holds up the others."""

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from whet.runtime.channel import receive, send
from whet_weights.handshake import Expected, HandshakeError, Server, connect_to

TOKEN = b"a token of 32 bytes and no others"


@pytest.fixture
def clients() -> Expected:
    return Expected()


@pytest.fixture
def server(clients: Expected) -> Iterator[Server]:
    made = Server("127.0.0.1", TOKEN, clients.take, handshake_seconds=0.5)
    yield made
    made.close()


def test_a_client_that_is_expected_gets_a_connection(server: Server, clients: Expected) -> None:
    expected = clients.expect("backend-0")
    with connect_to(server.address, TOKEN, "backend-0") as client, expected.result(5.0) as host:
        send(client, [b"hello"])
        assert receive(host) == [b"hello"]


def test_a_client_without_the_token_is_refused_and_logged(
    server: Server, clients: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    expected = clients.expect("backend-0")
    # It learns at once that the server's token is another; one that does not look cannot prove that it knows it.
    with pytest.raises(HandshakeError, match="does not know the run's token"):
        connect_to(server.address, b"another token", "backend-0")
    with caplog.at_level(logging.WARNING), socket.create_connection(server.address) as stranger:
        stranger.sendall(b"whet\x00\x01\r\n" + bytes(32))
        stranger.recv(64, socket.MSG_WAITALL)
        stranger.sendall(bytes(32) + b"\x09backend-0")
        assert stranger.recv(1) == b""
    assert "127.0.0.1" in caplog.text
    assert not expected.done()


def test_a_client_that_was_heard_cannot_be_played_back(server: Server, clients: Expected) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on() -> None:
            client, _ = between.accept()
            with client, socket.create_connection(server.address) as host:
                for size, (one, other) in ((40, (client, host)), (64, (host, client)), (34, (client, host))):
                    words = one.recv(size, socket.MSG_WAITALL)
                    heard.append(words)
                    other.sendall(words)
                client.sendall(host.recv(2, socket.MSG_WAITALL))

        thread = threading.Thread(target=pass_on)
        thread.start()
        first = clients.expect("x")
        connect_to(between.getsockname(), TOKEN, "x").close()
        first.result(5.0).close()
        thread.join(5.0)
    again = clients.expect("x")
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(heard[0])
        stranger.recv(64, socket.MSG_WAITALL)
        stranger.sendall(heard[2])
        assert stranger.recv(1) == b""
    assert not again.done()


def test_what_is_no_client_at_all_is_refused(server: Server) -> None:
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        stranger.settimeout(5.0)
        with pytest.raises((ConnectionResetError, IndexError)):
            assert stranger.recv(1)[0]


def test_who_says_nothing_is_put_out_and_holds_nobody_up(server: Server, clients: Expected) -> None:
    silent = [socket.create_connection(server.address) for _ in range(70)]
    begin = time.monotonic()
    expected = clients.expect("late")
    connect_to(server.address, TOKEN, "late").close()
    expected.result(5.0).close()
    assert silent[0].recv(1) == b""
    assert time.monotonic() - begin < 5.0
    for one in silent:
        one.close()


STRANGERS = """
import selectors, socket, sys
port, count, source = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
selector = selectors.DefaultSelector()
def come():
    selector.register(socket.create_connection(("127.0.0.1", port), source_address=(source, 0)), selectors.EVENT_READ)
for _ in range(count):
    come()
print("here", flush=True)
while True:
    for key, _ in selector.select():
        selector.unregister(key.fileobj)
        key.fileobj.close()
        come()
"""


@contextmanager
def strangers(server: Server, count: int, source: str) -> Iterator[None]:
    """Somebody who opens so many connections, says nothing, and comes back as soon as one is ended."""
    program = [sys.executable, "-c", STRANGERS, str(server.address[1]), str(count), source]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def test_strangers_that_come_back_again_and_again_keep_nobody_out(clients: Expected) -> None:
    server = Server("127.0.0.1", TOKEN, clients.take)  # who says nothing may do so for 10 s
    with strangers(server, 300, "127.0.0.1"):
        begin = time.monotonic()
        for name in ("first", "second", "third"):
            expected = clients.expect(name)
            connect_to(server.address, TOKEN, name).close()
            expected.result(5.0).close()
        assert time.monotonic() - begin < 9.0
    server.close()


def test_strangers_from_elsewhere_do_not_cost_a_slow_client_its_place(clients: Expected) -> None:
    server, expected = Server("127.0.0.1", TOKEN, clients.take), clients.expect("slow")
    with socket.create_server(("127.0.0.1", 0)) as between, strangers(server, 300, "127.0.0.2"):
        tries = []

        def pass_on() -> None:
            while True:
                client, _ = between.accept()
                tries.append(client)
                with client, socket.create_connection(server.address) as host, suppress(OSError):
                    for size, (one, other) in ((40, (client, host)), (64, (host, client)), (37, (client, host))):
                        time.sleep(0.5)  # 1.5 s in all: the strangers come and go some twenty times
                        other.sendall(one.recv(size, socket.MSG_WAITALL))
                    client.sendall(host.recv(2, socket.MSG_WAITALL))

        threading.Thread(target=pass_on, daemon=True).start()
        connect_to(between.getsockname(), TOKEN, "slow", 20.0).close()
        expected.result(5.0).close()
        assert len(tries) == 1
    server.close()


def test_many_clients_that_come_at_once_all_get_in(clients: Expected) -> None:
    server = Server("127.0.0.1", TOKEN, clients.take)
    expected = [clients.expect(f"backend-{rank}") for rank in range(300)]
    with ThreadPoolExecutor(300) as pool:
        come = [pool.submit(connect_to, server.address, TOKEN, f"backend-{rank}") for rank in range(300)]
        for mine, theirs in zip(come, expected, strict=True):
            mine.result(30.0).close()
            theirs.result(5.0).close()
    server.close()


def test_of_strangers_without_number_a_few_are_logged_and_then_how_many(
    clients: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("127.0.0.1", TOKEN, clients.take)
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            with socket.create_connection(server.address) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                stranger.settimeout(5.0)
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        server.close()
    assert [record.getMessage().startswith("refused") for record in caplog.records] == [True] * 5 + [False]
    assert "195 more like this; the last: refused a connection from 127.0.0.1:" in caplog.text


def test_a_name_comes_in_once(server: Server, clients: Expected) -> None:
    expected = clients.expect("backend-0")
    connect_to(server.address, TOKEN, "backend-0").close()
    expected.result(5.0).close()
    with connect_to(server.address, TOKEN, "backend-0") as second:
        assert second.recv(1) == b""


def test_a_server_that_is_not_of_the_run_learns_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            client, _ = other.accept()
            with client:
                client.recv(40, socket.MSG_WAITALL)
                client.sendall(bytes(64))
                told.append(client.recv(100))

        told: list[bytes] = []
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HandshakeError, match="who listens at 127"):
            connect_to(other.getsockname(), TOKEN, "backend-0")
        thread.join(5.0)
        assert told == [b""]


def test_a_server_that_ran_out_of_file_descriptors_takes_connections_again() -> None:
    program = """
import os, resource, socket, time
from whet_weights.handshake import Server, Expected, connect_to
clients, held = Expected(), []
server, expected, early = Server("127.0.0.1", bytes(32), clients.take), clients.expect("late"), socket.socket()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        held.append(os.open("/dev/null", 0))
except OSError:
    pass
early.connect(server.address)
time.sleep(0.3)
for descriptor in held:
    os.close(descriptor)
connect_to(server.address, bytes(32), "late")
expected.result(20)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "could not let a client in: [Errno 24] Too many open files" in done.stderr
