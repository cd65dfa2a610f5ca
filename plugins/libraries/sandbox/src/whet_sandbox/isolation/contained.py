"""The supervisor as process 1 of a container, which has built the walls. Stdin and stdout lead to the driver."""

import os
import signal
import sys
from typing import Final

from whet_sandbox.isolation import frames, kernel
from whet_sandbox.isolation.namespaces import Refused
from whet_sandbox.isolation.supervisor import Supervisor

_IN, _OUT = 0, 1
_BROKEN: Final = "broken"


class StandardStreams:
    """Stdin and stdout as one stream."""

    def fileno(self) -> int:
        """Return the descriptor that is read."""
        return _IN

    def recv(self, size: int, /) -> bytes:
        """Read at most so many bytes."""
        return os.read(_IN, size)

    def sendall(self, data: bytes, /) -> None:
        """Write all of these bytes."""
        while data:
            data = data[os.write(_OUT, data) :]


def main() -> None:
    """Serve the driver until it closes stdin."""
    control = StandardStreams()
    try:
        if os.getpid() != 1:
            raise Refused("the supervisor of a container must be its process 1")
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        for number in set(signal.Signals) - {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)  # programs can send them to process 1
        supervisor = Supervisor(control, os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), None)
        supervisor.serve()
    except Exception as error:
        control.sendall(frames.pack({"is": _BROKEN, "reason": f"{type(error).__name__}: {error}"}))
        sys.exit(1)


if __name__ == "__main__":
    main()
