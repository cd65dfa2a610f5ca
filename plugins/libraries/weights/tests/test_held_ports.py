"""Ports that the system picks: held for who needs them later, and missed in words."""

import socket

import pytest

from whet_weights.ports import is_taken, reserve


def test_a_port_that_is_held_is_given_to_nobody_but_who_is_told_of_it() -> None:
    with reserve("127.0.0.1") as held:
        port = held.getsockname()[1]
        assert not is_taken(port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # does not let addresses be used again
        with socket.create_server(("127.0.0.1", port)):
            assert is_taken(port)
