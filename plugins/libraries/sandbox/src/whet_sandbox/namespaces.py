"""The provider `namespaces`: sandboxes from the kernel's own means, without a daemon and without root."""

import array
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from whet_sandbox.config import NamespacesConfig
from whet_sandbox.isolation.file_system import PYTHON
from whet_sandbox.limits import Limits
from whet_sandbox.provider import SandboxBroken

_PACKAGES: Final = str(Path(__file__).parents[1])
_PROGRAM: Final = """
import sys
sys.path.append(sys.argv[3])
from whet_sandbox.isolation import launcher
launcher.main(int(sys.argv[1]), int(sys.argv[2]))
"""
_CLOSE_SECONDS: Final = 10.0
_ORDER_SECONDS: Final = 60.0
_MOST_WORDS: Final = 2000


class Namespaces:
    """Makes sandboxes by one launcher process, which starts with the first of them."""

    def __init__(self, config: NamespacesConfig) -> None:
        self.at_once, self.warm = config.at_once, config.warm
        own = not config.python
        self.python = f"{PYTHON}/bin/python3"
        self._real_python = os.path.realpath(_own_python() if own else config.python)
        prefix = sys.base_prefix if own else str(Path(self._real_python).parents[1])
        installed = [f"{prefix}/bin", f"{prefix}/lib", f"{prefix}/lib64"]
        packages = [os.path.abspath(folder) for folder in config.packages]
        shown = [*installed, *packages, *(os.path.abspath(folder) for folder in config.readable)]
        self._folders = sorted(set(shown) | {os.path.realpath(folder) for folder in shown})
        self.environment = {"PYTHONPATH": os.pathsep.join(packages)} if packages else {}
        self._lock, self._closed = threading.Lock(), False
        self._launcher: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    def open(self, limits: Limits) -> socket.socket:
        """Begin to make a sandbox; see `Provider.open`."""
        order = limits.as_order()
        settings = {name: order[name] for name in ("disk_bytes", "disk_files")}
        message = json.dumps({**settings, "folders": self._folders, "python": self._real_python})
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._send(message.encode(), theirs)
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """End the launcher and all sandboxes. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._end()

    def _send(self, message: bytes, theirs: socket.socket) -> None:
        """Send an order to the launcher. A launcher that has died is started once more."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
        with self._lock:
            for again in (True, False):
                if self._closed:
                    raise SandboxBroken("the sandbox is closed")
                if self._orders is None:
                    self._start()
                assert self._orders is not None
                try:
                    self._orders.sendmsg([message], rights)
                    return
                except OSError as error:
                    words = self._end()
                    if not again:
                        raise SandboxBroken(f"the launcher of sandboxes has ended: {error}; {words}") from error

    def _start(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(_ORDER_SECONDS)
        command = [_own_python(), "-I", "-S", "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), _PACKAGES]
        with theirs:
            try:
                self._launcher = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env={}, cwd="/", start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )  # fmt: skip
            except OSError as error:
                self._orders.close()
                self._orders = None
                raise SandboxBroken(f"the launcher of sandboxes cannot be started: {error}") from error

    def _end(self) -> str:
        """End the launcher, and return its last words."""
        launcher, orders = self._launcher, self._orders
        self._launcher = self._orders = None
        if orders is not None:
            orders.close()
        if launcher is None:
            return ""
        try:
            words = launcher.communicate(timeout=_CLOSE_SECONDS)[1]
        except subprocess.TimeoutExpired:
            launcher.kill()
            words = launcher.communicate()[1]
        return words.decode("utf-8", "replace")[-_MOST_WORDS:]


def _own_python() -> str:
    """Return the path of the Python behind this process's virtual environment."""
    python = getattr(sys, "_base_executable", "") or sys.executable
    with suppress(OSError):
        python = os.path.realpath(python)
    return python
