"""A worker that breaks its connection to the driver from inside."""

import os
import socket
import sys
import time

from whet.interfaces.workers import WorkerRank


class RudeWorker:
    """Does to its process's socket what no worker should."""

    def __init__(self, rank: WorkerRank) -> None:
        self._descriptor = int(sys.orig_argv[sys.orig_argv.index("whet.runtime.worker_process") + 1])

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def hang_up(self) -> None:
        """Close the connection, and live on."""
        with socket.socket(fileno=os.dup(self._descriptor)) as connection:
            connection.shutdown(socket.SHUT_WR)
        time.sleep(1000.0)

    def babble(self) -> None:
        """Send bytes that are no message, and live on."""
        os.write(self._descriptor, b"lorem ipsum dolor sit amet")
        time.sleep(1000.0)
