"""Ports that the system picks: held for who needs them later, and missed in words."""

import socket
import subprocess
import sys

import pytest

from whet.runtime.ports import is_taken, reserve

NONE_LEFT = """
import socket
from whet.runtime.door import Door
from whet.runtime.ports import shortage
from whet.errors import WhetError

held = []
try:
    while True:
        held.append(socket.create_server(("127.0.0.1", 0)))
except OSError:
    pass
try:
    Door("127.0.0.1", b"token", print, purpose="weight syncs")
except WhetError as error:
    print(error)
print(shortage())
held[0].close()
print([shortage()])
"""


def test_where_the_system_has_no_port_left_the_error_says_what_for_and_what_to_do() -> None:
    narrow = 'ip spec set lo up && echo "40000 40003" > /proc/sys/net/ipv4/ip_local_port_range && exec "$0" "$@"'
    command = ["unshare", "--net", "sh", "-c", narrow, sys.executable, "-c", NONE_LEFT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a network with few ports of its own needs unshare and ip, and the right to use them: {error}")
    door, short, fine = done.stdout.splitlines()
    assert door.startswith("cannot listen at 127.0.0.1 for weight syncs: ")
    assert door.endswith(short)
    assert "(40000-40003): end what holds them" in short
    assert fine == "['']"


def test_a_port_that_is_held_is_given_to_nobody_but_who_is_told_of_it() -> None:
    with reserve("127.0.0.1") as held:
        port = held.getsockname()[1]
        assert not is_taken(port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # does not let addresses be used again
        with socket.create_server(("127.0.0.1", port)):
            assert is_taken(port)
