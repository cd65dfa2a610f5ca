"""An engine's log is turned into the few lines that say why it ended."""

import subprocess
import sys
from pathlib import Path

import pytest

from whet.errors import ConfigError, WorkerLost
from whet.runtime.interpreters import probe
from whet.runtime.local import LocalCluster
from whet.runtime.log_excerpt import causes, errors, last_error
from whet.runtime.process import printable
from whet_testing.scripted_worker import TARGET

LOG = """\
[MainProcess] INFO Initializing a V1 LLM engine
[VllmWorker-0] ERROR WorkerProc failed to start.
Traceback (most recent call last):
  File "/x/multiproc_executor.py", line 900, in worker_main
    worker = WorkerProc(*args, **kwargs)
ValueError: Head size 16 is not supported by CPU attention.
  Supported head sizes are: 32, 64.
[2026-01-02 03:04:05] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/scheduler.py", line 1, in __init__
RuntimeError: Not enough memory.
[EngineCore] ERROR EngineCore failed to start.
Traceback (most recent call last):
  File "/x/core.py", line 1, in run_engine_core
    raise e from None
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
"""


def test_the_first_cause_is_quoted_and_those_that_only_point_to_it_are_not(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    said = causes(tmp_path / "log")
    assert said.splitlines() == [
        "ValueError: Head size 16 is not supported by CPU attention.",
        "  Supported head sizes are: 32, 64.",
        "RuntimeError: Not enough memory.",
    ]


def test_without_an_error_the_last_lines_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"[EngineCore] INFO line {n}" for n in range(9)) + "\n\n")
    assert causes(tmp_path / "log").splitlines() == [f"[EngineCore] INFO line {n}" for n in (6, 7, 8)]
    assert causes(tmp_path / "none") == ""


def test_where_one_log_has_no_error_another_may(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("[EngineCore] WARNING a detail\n")
    (tmp_path / "stderr").write_text("Traceback (most recent call last):\nOSError: libtorch.so: no such file\n")
    assert causes(tmp_path / "log", tmp_path / "stderr") == "OSError: libtorch.so: no such file"
    assert errors(tmp_path / "log") == ""
    assert causes(tmp_path / "log", tmp_path / "none") == "[EngineCore] WARNING a detail"


DIES_ON_IMPORT = """
import atexit, sys, warnings
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            raise ImportError("libtorch.so: undefined symbol\\n  of another torch")
sys.meta_path.insert(0, Broken())
@atexit.register
def trail():
    for number in range(40):
        warnings.warn(f"there appear to be {number + 2} leaked semaphores")
"""
CAUSE = "ImportError: libtorch.so: undefined symbol\n  of another torch"


def test_what_a_process_dies_of_is_quoted_whatever_it_says_after_that(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIES_ON_IMPORT)
    with (
        LocalCluster(tmp_path / "logs", environment={"PYTHONPATH": str(tmp_path)}) as cluster,
        pytest.raises(WorkerLost, match="its process exited with code 1") as caught,
    ):
        cluster.slice("generator").spawn(TARGET, {})
    assert (tmp_path / "logs/generator-0.log").read_text().count("leaked semaphores") >= 40
    assert caught.value.last_words.endswith(CAUSE)


def test_what_an_interpreter_dies_of_when_it_is_asked_is_quoted(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{DIES_ON_IMPORT}\nimport numpy\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="no Python that can be used: ImportError: libtorch"):
        probe(python)


def test_an_exception_that_warnings_have_washed_away_comes_before_the_last_lines() -> None:
    program = "import sys\ntry:\n    import no_such\nfinally:\n    pass"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    error = "ModuleNotFoundError: No module named 'no_such'"
    assert last_error(done.stderr) == error
    for text, quoted in (
        (done.stderr + "it ends\n" * 3, [error, "it ends", "it ends", "it ends"]),
        (done.stderr + "it ends\n" * 9, [error, "it ends", "it ends", "it ends"]),
        (done.stderr + "x.py:1: UserWarning: a\n  warn()\nit ends\n" * 3, [error, "it ends", "it ends", "it ends"]),
        ("x.py:1: UserWarning: a\n" * 9, ["x.py:1: UserWarning: a"] * 4),
    ):
        assert printable(text.encode(), 4).splitlines() == quoted
