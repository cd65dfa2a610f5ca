"""A process that traces cases, because planning imports no torch, and a cache of what it found.

The cache lies in `$XDG_CACHE_HOME/whet/memory`, by default `~/.cache`. A file's name is a hash of all that the result
depends on: the case, the code that traces, and the versions of torch and transformers. Without a home folder there is
no cache.
"""

import functools
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from whet.errors import WhetError
from whet.runtime.interpreters import surroundings
from whet_memory.case import Case, Peak, Peaks, Phase

SECONDS: Final = 120.0
"""The longest time that one trace may take, the imports of torch and transformers included."""
_TRAINING: Final[dict[str, Phase]] = {"forward": "train", "backward": "train"}


class TraceError(WhetError):
    """A case cannot be traced."""


class Tracer:
    """Traces cases in a process of a role's Python. The process starts at the first question."""

    def __init__(self, python: str = sys.executable, *, use_cache: bool = True, seconds: float = SECONDS) -> None:
        root = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        self._cache = Path(root, "whet", "memory") if use_cache and not root.startswith("~") else None
        self._python, self._seconds = python, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def __enter__(self) -> "Tracer":
        """Start nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def known(self, trace: str, case: Case) -> Peaks | None:
        """Return the peaks of a case that was traced before. Nothing is started."""
        if self._cache is None:
            return None
        with suppress(OSError, ValueError):
            return _peaks(json.loads((self._cache / self._name(trace, case)).read_bytes()))
        return None

    def peaks(self, trace: str, case: Case) -> Peaks:
        """Return the peaks of a case. Raises `TraceError` with the reason if it cannot be traced."""
        if (found := self.known(trace, case)) is not None:
            return found
        answer = self._ask({"trace": trace, "case": case.to_json()})
        if "peaks" not in answer:
            raise TraceError(str(answer.get("failed")))
        if self._cache is not None:
            _write(self._cache / self._name(trace, case), answer["peaks"])
        return _peaks(answer["peaks"])

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise TraceError(f"the process that traces has ended: {error}") from error
        found: dict[str, Any] = json.loads(self._line(process))
        return found

    def _line(self, process: "subprocess.Popen[bytes]") -> bytes:
        """Return a line of the process. Raises `TraceError` if it ends or takes too long."""
        assert process.stdout is not None
        until = time.monotonic() + self._seconds
        while b"\n" not in self._rest:
            if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                self.__exit__(None, None, None)
                raise TraceError(f"it took more than {self._seconds:g} s")
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                raise TraceError(f"the process that traces ended with code {process.wait()}")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._process = subprocess.Popen(
                [self._python, "-m", "whet_memory.tracing"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, env={**surroundings(self._python, os.environ), "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        return self._process

    def _name(self, trace: str, case: Case) -> str:
        """Return the name of a case's file in the cache. It depends on everything that the result depends on."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (trace, case.to_json(), self._python, _versions()):
            digest.update(json.dumps(part, sort_keys=True).encode())
        digest.update(_code(trace.partition(".")[0]))
        return f"{digest.hexdigest()}.json"


@functools.cache
def _code(module: str) -> bytes:
    """Return a hash of the code that traces for a component, of the libraries below it, and of their versions."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (module, "whet_memory", "whet_ops"):
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for file in sorted(Path(folder).glob("*.py")):
                digest.update(file.read_bytes())
    return digest.digest()


@functools.cache
def _versions() -> list[str]:
    found = []
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            found.append(version(name))
    return found


def _write(file: Path, value: Any) -> None:
    """Write a file of the cache whole. A cache that cannot be written is none."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(value))
        partial.replace(file)


def _peaks(traced: dict[str, int]) -> dict[Phase, Peak]:
    """Return the peaks of phases from the peaks of their parts."""
    found: dict[Phase, Peak] = {}
    for name, size in traced.items():
        phase: Any = _TRAINING.get(name, name)
        found[phase] = Peak(max(size, found[phase].device if phase in found else 0))
    return found
