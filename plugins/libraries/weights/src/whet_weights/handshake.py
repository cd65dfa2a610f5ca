"""Connections over TCP between processes of one run: both ends prove that they know the run's token.

    client   "whet" + its nonce                                    ->
             <-  the server's nonce + HMAC(token, "server" + both nonces)    server
    client   HMAC(token, "client" + both nonces + name) + name     ->
             <-  "in"                                                        server

The token itself is never sent. If a client does not know the token, the server refuses the client and logs the refusal.
Each handshake has a deadline. It ends sooner when other clients wait for its place. A client that loses its place to
strangers tries again. Later messages are neither encrypted nor signed: whet trusts the network between the nodes, as
Ray does for its own traffic.
"""

import hmac
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from whet.errors import WhetError
from whet.runtime.channel import receive_exactly
from whet.runtime.threads import watched
from whet_weights.greetings import Greetings, Refusals
from whet_weights.ports import listen

_MAGIC: Final = b"whet\x00\x01\r\n"
_NONCE: Final = 32
_WELCOME: Final = b"in"
_HANDSHAKE_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 30.0
_LONGEST_NAME: Final = 255
_PAUSE_SECONDS: Final = 0.1
_LEAST_SECONDS: Final = 1e-4
_SILENCE_SECONDS: Final = 60
"""A connection is given up when its other end has not answered the kernel's probes for this long."""


class HandshakeError(WhetError):
    """A connection was refused: one end does not know the run's token, or the client is not expected."""


class Server:
    """Listens for clients. Calls `take` with the name and the connection of a client, in one thread per client."""

    def __init__(
        self,
        address: str,
        token: bytes,
        take: Callable[[str, socket.socket], None],
        handshake_seconds: float = _HANDSHAKE_SECONDS,
        purpose: str = "processes of the run",
    ) -> None:
        """Listen on an address of this machine, at a free port. If no port is free, the error names the `purpose`.

        `take` owns the connection that it gets. If `take` raises `HandshakeError`, the client is refused.
        """
        self._listener = listen(address, purpose)
        self._closed = False
        self._token, self._take, self._seconds = token, take, handshake_seconds
        self._greetings, self._refusals = Greetings(), Refusals()
        watched("whet-handshake", self._listen, self._lost, lambda: self._closed)

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and port on which the server listens."""
        host, port, *_ = self._listener.getsockname()
        return host, port

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._refusals.close()

    def _listen(self) -> None:
        while True:
            try:
                self._let_in(*self._listener.accept())
            except Exception as error:
                if self._closed:
                    return
                # No file descriptor or thread is left, or the client left while it waited. Other clients will come.
                self._refusals.add(f"could not let a client in: {error}")
                time.sleep(_PAUSE_SECONDS)

    def _lost(self, words: str) -> None:
        """Close the listening socket, so that clients are refused at once and do not wait for an answer."""
        self._refusals.add(words)
        self._listener.close()

    def _let_in(self, client: socket.socket, address: tuple[str, int]) -> None:
        self._greetings.enter(client, address[0])
        try:
            threading.Thread(target=self._greet, args=(client, address), name="whet-greeting", daemon=True).start()
        except RuntimeError:
            self._greetings.leave(client)
            client.close()
            raise

    def _greet(self, client: socket.socket, address: tuple[str, int]) -> None:
        try:
            name = self._name_of(client)
            client.sendall(_WELCOME)
            _keep_open(client)
            self._take(name, client)
        except (OSError, EOFError, WhetError) as error:
            words = str(error) or type(error).__name__
            self._refusals.add(f"refused a connection from {address[0]}:{address[1]}: {words}")
            client.close()

    def _name_of(self, client: socket.socket) -> str:
        try:
            return greet(client, self._token, self._seconds)
        finally:
            if not self._greetings.leave(client):
                raise HandshakeError("others waited for its place")


class Expected:
    """The clients that are expected, by name. Pass the method `take` to a `Server`."""

    def __init__(self) -> None:
        self._futures: dict[str, Future[socket.socket]] = {}
        self._lock = threading.Lock()

    def expect(self, name: str) -> "Future[socket.socket]":
        """Return a future of the connection of the client with this name."""
        with self._lock:
            return self._futures.setdefault(name, Future())

    def forget(self, name: str) -> None:
        """Stop expecting a client."""
        with self._lock:
            self._futures.pop(name, None)

    def take(self, name: str, client: socket.socket) -> None:
        """Set the future of this client to its connection. Raises `HandshakeError` if nobody expects the client."""
        with self._lock:
            future = self._futures.pop(name, None)
        if future is None:
            raise HandshakeError(f"nobody expects {name!r}")
        future.set_result(client)


def greet(client: socket.socket, token: bytes, seconds: float) -> str:
    """Do the server's side of the handshake on one connection, up to the welcome, and return the client's name.

    Raises `HandshakeError`, `EOFError` or `OSError`.
    """
    receive = _receiver(client, seconds)
    if receive(len(_MAGIC)) != _MAGIC:
        raise HandshakeError("it does not speak whet's language")
    theirs, mine = receive(_NONCE), os.urandom(_NONCE)
    client.sendall(mine + _proof(token, b"server", theirs, mine))
    proof, length = receive(_NONCE), receive(1)[0]
    name = receive(length)
    if not hmac.compare_digest(proof, _proof(token, b"client", theirs, mine, name)):
        raise HandshakeError("it does not know the run's token")
    return name.decode()


def connect_to(address: tuple[str, int], token: bytes, name: str, seconds: float = _CONNECT_SECONDS) -> socket.socket:
    """Connect to a server under a name, and return the connection.

    The server may drop the connection during the handshake, to make room for other clients. Then this function
    connects again, until `seconds` are over. Raises `HandshakeError`, `EOFError` or `OSError`.
    """
    words = name.encode()
    if len(words) > _LONGEST_NAME:
        raise ValueError(f"the name {name!r:.60} has {len(words)} bytes, at most {_LONGEST_NAME} are taken")
    deadline = time.monotonic() + seconds
    while True:
        connection = socket.create_connection(address, max(deadline - time.monotonic(), _LEAST_SECONDS))
        try:
            _introduce(connection, address, token, words, deadline)
            return connection
        except (EOFError, ConnectionResetError, BrokenPipeError):
            connection.close()
            pause = random.uniform(0, 2 * _PAUSE_SECONDS)
            if time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
        except BaseException:
            connection.close()
            raise


def _introduce(connection: socket.socket, address: tuple[str, int], token: bytes, name: bytes, deadline: float) -> None:
    receive = _receiver(connection, max(deadline - time.monotonic(), _LEAST_SECONDS))
    mine = os.urandom(_NONCE)
    connection.sendall(_MAGIC + mine)
    theirs, proof = receive(_NONCE), receive(_NONCE)
    if not hmac.compare_digest(proof, _proof(token, b"server", mine, theirs)):
        raise HandshakeError(f"who listens at {address[0]}:{address[1]} does not know the run's token")
    connection.sendall(_proof(token, b"client", mine, theirs, name) + bytes([len(name)]) + name)
    receive(len(_WELCOME))
    _keep_open(connection)


def _receiver(connection: socket.socket, seconds: float) -> Callable[[int], bytes]:
    deadline = time.monotonic() + seconds
    connection.settimeout(seconds)
    return lambda size: bytes(receive_exactly(connection, size, deadline))


def _proof(token: bytes, who: bytes, *said: bytes) -> bytes:
    return hmac.digest(token, b"|".join((who, *said)), "sha256")


def _keep_open(connection: socket.socket) -> None:
    """Make a connection block without a deadline, send without delay, and notice when the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _SILENCE_SECONDS // 3),
        ("TCP_KEEPINTVL", _SILENCE_SECONDS // 6),
        ("TCP_KEEPCNT", 4),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
