"""The provider `docker`: a container for each sandbox, by the command line of Docker or Podman.

The container has no network, no capabilities, a read-only root, and limits of its own. Inside it the same supervisor
runs as process 1, with the same limits for each program, Landlock and the filter of system calls.
"""

import secrets
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from whet_sandbox.config import DockerConfig
from whet_sandbox.isolation import frames
from whet_sandbox.limits import Limits
from whet_sandbox.provider import SandboxBroken

_HERE: Final = Path(__file__).parent
_PROGRAM: Final = (
    "import sys; sys.path.append('/supervisor'); from whet_sandbox.isolation import contained; contained.main()"
)
_USER: Final = 64_534
_MOST_WORDS: Final = 2000
_CLOSE_SECONDS: Final = 20.0


class Docker:
    """Makes a container for each sandbox."""

    def __init__(self, config: DockerConfig) -> None:
        self._config = config
        self.at_once, self.warm, self.python = config.at_once, config.warm, config.python
        self.environment: dict[str, str] = {}
        self._threads: list[threading.Thread] = []
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lock, self._closed = threading.Lock(), False

    def command(self, name: str, limits: Limits) -> list[str]:
        """Return the command that starts a container."""
        config, owner = self._config, f"uid={_USER},gid={_USER}"
        files = f"nr_inodes={limits.disk_files},size={limits.disk_mib}m,{owner},mode=700"
        return [
            config.command, "run", "--rm", "--interactive", "--pull", "never", "--name", name,
            "--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--ipc", "none", "--user", f"{_USER}:{_USER}", "--pids-limit", str(limits.processes + 8),
            "--memory", f"{config.memory_mib}m", "--memory-swap", f"{config.memory_mib}m",
            "--tmpfs", f"/box:rw,exec,nosuid,nodev,{files}", "--tmpfs", f"/tmp:rw,exec,nosuid,nodev,{files}",
            "--mount", f"type=bind,src={_HERE},dst=/supervisor/whet_sandbox,readonly",
            *(["--runtime", config.runtime] if config.runtime else []),
            "--entrypoint", config.python, config.image, "-I", "-S", "-c", _PROGRAM,
        ]  # fmt: skip

    def open(self, limits: Limits) -> socket.socket:
        """Begin to start a container; see `Provider.open`."""
        if self._closed:
            raise SandboxBroken("the sandbox is closed")
        name = f"whet-{secrets.token_hex(8)}"
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                self.command(name, limits),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            theirs.close()
            raise SandboxBroken(f"{self._config.command} cannot be started: {error}") from error
        with self._lock:
            self._running[name] = process
        thread = threading.Thread(target=self._await, args=(name, process, theirs), daemon=True)
        thread.start()
        self._threads.append(thread)
        return ours

    def close(self) -> None:
        """End all containers. A second call does nothing."""
        self._closed = True
        with self._lock:
            names = list(self._running)
        if names:
            with suppress(OSError, subprocess.SubprocessError):
                command = [self._config.command, "rm", "--force", *names]
                subprocess.run(command, capture_output=True, timeout=_CLOSE_SECONDS, check=False)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _await(self, name: str, process: "subprocess.Popen[bytes]", theirs: socket.socket) -> None:
        """Wait until a container has ended, and pass the words of the command on where it failed."""
        with theirs:
            words = process.communicate()[1].decode("utf-8", "replace").strip()[-_MOST_WORDS:]
            if process.returncode:
                reason = f"{self._config.command} run ended with code {process.returncode}: {words}"
                with suppress(OSError):  # nobody waits for this sandbox
                    theirs.settimeout(1.0)
                    theirs.sendall(frames.pack({"is": "broken", "reason": reason}))
        with self._lock:
            self._running.pop(name, None)
