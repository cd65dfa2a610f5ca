"""Where an engine's processes write."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STDERR = 2
_END_SECONDS = 5.0


def logging_config(file: Path, log: Path) -> Path:
    """Write a config that lets all of an engine's processes write to `log`, and warnings to stderr as well."""
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
def overheard(log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Have processes that are started meanwhile write their stderr, for as long as they live, to `log` as well.

    What one dies of before it can log, as of an import, is written nowhere else that this process can read. Gives the
    process that writes to both places, which ends after them; see `heard_out`.
    """
    own = os.dup(_STDERR)
    try:
        # Not a thread: it must go on while this interpreter is stuck, for stacks to be seen.
        command = ["sh", "-c", "trap '' INT TERM HUP; exec tee \"$0\"", str(log)]
        tee = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=own, stderr=own)
        assert tee.stdin is not None
        with tee.stdin:
            os.dup2(tee.stdin.fileno(), _STDERR)
        try:
            yield tee
        except BaseException:
            os.dup2(own, _STDERR)
            heard_out(tee)
            raise
        os.dup2(own, _STDERR)
    finally:
        os.close(own)


def heard_out(tee: "subprocess.Popen[bytes]") -> None:
    """Wait until all is written that processes said which have ended; where one lives on, end it."""
    try:
        tee.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        tee.kill()
        tee.wait()
