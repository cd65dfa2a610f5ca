"""Capture of the logs and the stderr of an engine's processes."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STDERR = 2
_END_SECONDS = 5.0


def logging_config(file: Path, log: Path) -> Path:
    """Write a logging config: all engine processes log to `log`, and warnings also to stderr. Returns the file."""
    handlers = {
        "file": {"class": "logging.FileHandler", "filename": str(log), "formatter": "plain", "level": "INFO"},
        "stderr": {"class": "logging.StreamHandler", "formatter": "plain", "level": "WARNING"},
    }
    document = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "[%(processName)s] %(levelname)s %(message)s"}},
        "handlers": handlers,
        "loggers": {"vllm": {"handlers": list(handlers), "level": "INFO", "propagate": False}},
    }
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


@contextmanager
def captured_stderr(log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Copy the stderr of processes that start within the context to `log`, for as long as these processes live.

    If a process fails before it can log, for example on an import, this copy is the only trace that can be read. Yields
    the process that writes to both places. It ends after the others; see `end_capture`.
    """
    own = os.dup(_STDERR)
    try:
        # Not a thread: stacks must be written even while this interpreter hangs.
        command = ["sh", "-c", "trap '' INT TERM HUP; exec tee \"$0\"", str(log)]
        tee = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=own, stderr=own)
        assert tee.stdin is not None
        with tee.stdin:
            os.dup2(tee.stdin.fileno(), _STDERR)
        try:
            yield tee
        except BaseException:
            os.dup2(own, _STDERR)
            end_capture(tee)
            raise
        os.dup2(own, _STDERR)
    finally:
        os.close(own)


def end_capture(tee: "subprocess.Popen[bytes]") -> None:
    """Wait until all output of ended processes is written. If a process still lives, kill the copying process."""
    try:
        tee.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        tee.kill()
        tee.wait()
