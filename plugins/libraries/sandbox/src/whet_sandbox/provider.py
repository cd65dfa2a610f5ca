"""The contract of providers, which make sandboxes, for the hook `whet_sandboxes`.

A provider connects to supervisors. What it returns from `open` is one end of a stream socket; at the other end the
program `whet_sandbox.isolation.supervisor` runs, wherever it is: beside the driver, in a container, on another machine.
"""

import socket
from typing import Protocol, runtime_checkable

from whet.errors import InfrastructureError
from whet_sandbox.limits import Limits


class SandboxBroken(InfrastructureError):  # noqa: N818 - it says what happened
    """A sandbox could not be made, or was lost. The program is not the cause, so nothing about it is known."""


@runtime_checkable
class Provider(Protocol):
    """Makes sandboxes. The component's target is called as `target(config)`."""

    at_once: int
    """Most sandboxes at a time."""
    warm: int
    """Sandboxes that wait for their program."""
    python: str
    """Path of Python inside a sandbox."""
    environment: dict[str, str]
    """Further environment variables of every program."""

    def open(self, limits: Limits) -> socket.socket:
        """Begin to make a sandbox, and return the socket of its supervisor, without waiting for it.

        Raises `SandboxBroken`.
        """

    def close(self) -> None:
        """End all sandboxes. A second call does nothing."""
