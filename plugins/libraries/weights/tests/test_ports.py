"""A server where the system has no port left."""

import subprocess
import sys

import pytest

NONE_LEFT = """
import socket
from whet_weights.handshake import Server
from whet_weights.ports import shortage
from whet.errors import WhetError

held = []
try:
    while True:
        held.append(socket.create_server(("127.0.0.1", 0)))
except OSError:
    pass
try:
    Server("127.0.0.1", b"token", print, purpose="weight syncs")
except WhetError as error:
    print(error)
print(shortage())
held[0].close()
print([shortage()])
"""


def test_where_the_system_has_no_port_left_the_error_says_what_for_and_what_to_do() -> None:
    narrow = 'ip link set lo up && echo "40000 40003" > /proc/sys/net/ipv4/ip_local_port_range && exec "$0" "$@"'
    command = ["unshare", "--net", "sh", "-c", narrow, sys.executable, "-c", NONE_LEFT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a network with few ports of its own needs unshare and ip, and the right to use them: {error}")
    server, short, fine = done.stdout.splitlines()
    assert server.startswith("cannot listen at 127.0.0.1 for weight syncs: ")
    assert server.endswith(short)
    assert "(40000-40003): end what holds them" in short
    assert fine == "['']"
