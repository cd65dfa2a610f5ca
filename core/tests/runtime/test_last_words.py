"""A process that ends is quoted with what it died of."""

import subprocess
import sys
from pathlib import Path

import pytest

from whet.errors import ConfigError, WorkerLost
from whet.runtime.interpreters import probe
from whet.runtime.last_words import last_error, printable
from whet.runtime.local import LocalCluster
from whet_testing.scripted_worker import TARGET

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
        cluster.worker_group("generator").spawn(TARGET, {})
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


def test_a_traceback_that_is_still_being_written_is_left_out() -> None:
    begun = ["Traceback (most recent call last):", '  File "worker.py", line 3, in run', "    self.take()"]
    assert printable("\n".join(["loading", *begun]).encode()) == "loading"
    assert (
        printable("\n".join([*begun, "ValueError: no", "going on", *begun]).encode(), 2) == "ValueError: no\ngoing on"
    )
    assert printable("\n".join(begun).encode()) == "\n".join(begun)
