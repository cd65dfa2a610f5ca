"""Where senders and receivers of weights find each other: the driver's part of a bucket stream.

sender    "sender/SESSION/0"      {"version": 7, "address": [host, port], "place": ""}  -> exchange, which confirms
receiver  "receiver/SESSION/0"    {"senders": 1, "seconds": 300.0}     -> exchange, which answers once all are there
<- {"found": [{"sender": 0, "session": SESSION, "version": 7, "address": [...], "place": ""}]}
"""

import secrets
import socket
import threading
import time
from contextlib import closing
from typing import Any

from whet.runtime.channel import receive, send
from whet.runtime.wire import decode, encode
from whet_weights.handshake import HandshakeError, Server

_MESSAGE_SECONDS = 10.0
_LARGEST_MESSAGE = 1 << 20


class Exchange:
    """Listens on an address of the driver's machine. Remembers the newest session of each sender."""

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(32)
        self._senders: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._server = Server(address, bytes.fromhex(self.token), self._take, purpose="weight syncs")

    @property
    def address(self) -> str:
        """Return the address in the form of a spec."""
        return f"{self._server.address[0]}:{self._server.address[1]}"

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _take(self, name: str, client: socket.socket) -> None:
        kind, session, number = name.split("/")
        with closing(client):
            said = decode(receive(client, _LARGEST_MESSAGE, time.monotonic() + _MESSAGE_SECONDS), records=False)
            if kind == "sender":
                offer = {"sender": int(number), "session": session, **said}
                with self._changed:
                    self._senders[offer["sender"]] = offer
                    self._changed.notify_all()
                send(client, encode({"noted": session}))
            elif kind == "receiver":
                client.settimeout(_MESSAGE_SECONDS)
                send(client, encode({"found": self._await(session, said["senders"], said["seconds"])}))
            else:
                raise HandshakeError(f"it called itself {kind!r:.20}")

    def _await(self, session: str, senders: int, seconds: float) -> list[dict[str, Any]]:
        """Wait for all senders of a session. Return the senders that are known in the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: sum(offer["session"] == session for offer in self._senders.values()) >= senders, seconds
            )
            return [self._senders[sender] for sender in sorted(self._senders)]
