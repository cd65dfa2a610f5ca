"""Free ports, chosen by the operating system: to listen on, or to reserve for another process.

Where no port is free, the error says why, and what to do.
"""

import errno
import socket
from pathlib import Path
from typing import Final

from whet.errors import WhetError

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def listen(address: str, purpose: str, backlog: int = 1024) -> socket.socket:
    """Return a socket that listens at an address of this machine. Raises `WhetError`, which names the `purpose`."""
    try:
        return socket.create_server((address, 0), family=family(address), backlog=backlog)
    except OSError as error:
        raise WhetError(f"cannot listen at {address} for {purpose}: {error}{_advice(error)}") from error


def reserve(address: str) -> socket.socket:
    """Reserve a port without listening, for a process that sets SO_REUSEADDR on its socket, as torch does.

    The operating system gives the port to no other process until the returned socket is closed. Raises `WhetError`.
    """
    held = socket.socket(family(address))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((address, 0))
    except OSError as error:
        held.close()
        raise WhetError(f"cannot hold a port at {address}: {error}{_advice(error)}") from error
    return held


def shortage(address: str = "127.0.0.1") -> str:
    """Return what to do where the operating system has no free port at an address, or "" where it has one."""
    try:
        socket.create_server((address, 0), family=family(address)).close()
    except OSError as error:
        return _advice(error)
    return ""


def is_taken(port: int) -> bool:
    """Return whether a process listens on a port of this machine."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def family(address: str) -> socket.AddressFamily:
    """Return the socket family of an address: IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _advice(error: OSError) -> str:
    if error.errno != errno.EADDRINUSE:
        return ""
    found = "-".join(_RANGE.read_text(encoding="ascii").split()) if _RANGE.exists() else "its range"
    return (
        f"; the system has no port left of those that it gives ({found}): end what holds them (`ss -tanp` lists it), "
        "or widen the range (sysctl net.ipv4.ip_local_port_range)"
    )
