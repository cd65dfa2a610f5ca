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
        """Give that of its process."""
        return os.getpid()

    def hang_up(self) -> None:
        """Say nothing any more, and live on."""
        with socket.socket(fileno=os.dup(self._descriptor)) as connection:
            connection.shutdown(socket.SHUT_WR)
        time.sleep(1000.0)

    def babble(self) -> None:
        """Say what nobody understands, and live on."""
        os.write(self._descriptor, b"lorem ipsum dolor sit amet")
        time.sleep(1000.0)
