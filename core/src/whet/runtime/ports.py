"""Ports that the system picks: to listen on, and to hold for another process; where there is none, why in words."""

import errno
import socket
from pathlib import Path
from typing import Final

from whet.errors import WhetError

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def listen(address: str, purpose: str, backlog: int = 1024) -> socket.socket:
    """Listen at an address of this machine. Raises `WhetError`; `purpose` says in it what for."""
    try:
        return socket.create_server((address, 0), family=family(address), backlog=backlog)
    except OSError as error:
        raise WhetError(f"cannot listen at {address} for {purpose}: {error}{_advice(error)}") from error


def reserve(address: str) -> socket.socket:
    """Hold a port, without listening, for a process that lets addresses be used again, as torch does.

    The system gives it to nobody else until it is closed. Raises `WhetError`.
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
    """Say what to do where the system has no port left to give at an address; empty where it has."""
    try:
        socket.create_server((address, 0), family=family(address)).close()
    except OSError as error:
        return _advice(error)
    return ""


def is_taken(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def family(address: str) -> socket.AddressFamily:
    """Give the family of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _advice(error: OSError) -> str:
    if error.errno != errno.EADDRINUSE:
        return ""
    found = "-".join(_RANGE.read_text(encoding="ascii").split()) if _RANGE.exists() else "its range"
    return (
        f"; the system has no port left of those that it gives ({found}): end what holds them (`ss -tanp` lists it), "
        "or widen the range (sysctl net.ipv4.ip_local_port_range)"
    )
