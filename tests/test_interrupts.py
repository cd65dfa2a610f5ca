"""Ctrl-C is acknowledged at once, whatever the run does, and what is said of a second one is true.

The run stops at a moment until it is let go on, so that no test depends on how fast the machine is.
"""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import frozen

from whet.data.files import read_rows
from whet.run import checkpoint
from whet.run.run_folder import RunFolder
from whet_testing.processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]

PAUSING = Path(__file__).parent / "pausing.py"
COMMAND = [sys.executable, "-m", "whet.cli", "run"]
AGAIN = "; Ctrl-C again ends at once, without saving"
CLOSING = "closing the workers; Ctrl-C again does not wait for them"


@frozen
class Run:
    """A run under way, and the end at which its output is read."""

    process: subprocess.Popen
    reader: int
    terminal: bool
    folder: Path
    go: Path
    told: list[str]

    def until(self, pattern: str) -> str:
        """Read until something is said, and give all that was said."""
        while not re.search(pattern, self.text):
            try:
                found = os.read(self.reader, 65536)
            except OSError:  # the end of a terminal
                found = b""
            assert found, f"it ended without saying {pattern!r}:\n{self.text}"
            self.told.append(found.decode(errors="replace"))
        return self.text

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(self.told))

    def press(self) -> None:
        """Press Ctrl-C."""
        if self.terminal:
            os.write(self.reader, b"\x03")
        else:
            self.process.send_signal(signal.SIGINT)

    def ended(self) -> int:
        """Read to the end and give the exit code."""
        try:
            while found := os.read(self.reader, 65536):
                self.told.append(found.decode(errors="replace"))
        except OSError:
            pass
        return self.process.wait(60)


def listening() -> None:
    """Take a terminal, and the Ctrl-C that a shell withholds from what runs in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start(tmp_path, small_run):
    """Start a run that stops at a moment."""
    started: list[Run] = []

    def run(moment: str, terminal: bool = False, **sections) -> Run:
        go = tmp_path / "go"
        pausing = {"moment": moment, "go": str(go)}
        config = small_run(tmp_path, **{
            "run": {"folder": str(tmp_path / "run"), "steps": 3},
            "backend": {"use": "pausing", **pausing}, "generator": {"use": "letters"},
            "environments": [{"use": "letters", **pausing}],
            "evaluation": {"at_start": False, "every": 2, "environments": [{"use": "letters", **pausing}]},
            "weight_sync": {"probe": {"every": 0}},  # nothing is computed that could be compared
            "cluster": {"workers": "inline"}, "plugins": [str(PAUSING)], "loggers": ["console"], **sections,
        })  # fmt: skip
        reader, writer = pty.openpty() if terminal else os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *COMMAND, str(config)] if terminal else [*COMMAND, str(config)],
            stdin=writer if terminal else subprocess.DEVNULL, stdout=writer, stderr=writer,
            start_new_session=terminal, preexec_fn=None if terminal else listening,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        )  # fmt: skip
        os.close(writer)
        started.append(Run(process, reader, terminal, tmp_path / "run", go, []))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()
        os.close(one.reader)


IN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Takes the terminal that is standard input as its own, so that Ctrl-C there reaches it."""


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
@pytest.mark.parametrize(
    ("moment", "words", "saved", "code"),
    [
        ("start-up", f"ending before the first step; {CLOSING}", 0, 130),
        ("rollouts", "ending; no step is finished, so nothing is saved; Ctrl-C again ends at once", 0, 130),
        ("step", f"finishing step 1, then saving{AGAIN}", 1, 130),
        ("evaluation", f"finishing the evaluation after step 2, then saving{AGAIN}", 2, 130),
        ("saving", f"saving step 3, then ending{AGAIN}", 3, 0),
        ("export", "writing the model, then ending; Ctrl-C again ends at once, without the model", 3, 0),
        ("closing", CLOSING, 3, 0),
    ],
)
def test_a_first_ctrl_c_is_acknowledged_at_once(start, moment, words, saved, code, terminal):
    run = start(moment, terminal)
    run.until(f"at {moment}")
    run.press()
    run.until(re.escape(f"Ctrl-C: {words}"))  # while it is held up: nothing has been let go on
    run.go.touch()
    assert run.ended() == code, run.text
    assert "Traceback" not in run.text
    assert checkpoint.newest(RunFolder(run.folder)) == saved
    assert run.text.count("Ctrl-C:") == 1


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
@pytest.mark.parametrize("moment", ["step", "evaluation", "saving", "export"])
def test_a_second_ctrl_c_ends_at_once_without_saving(start, moment, terminal):
    run = start(moment, terminal)
    run.until(f"at {moment}")
    run.press()
    run.until("Ctrl-C again ends at once, without")
    run.press()
    run.until(f"Ctrl-C: ending at once, without .*{CLOSING}")
    assert run.ended() == 130, run.text  # though it was never let go on
    assert "Traceback" not in run.text
    assert checkpoint.newest(RunFolder(run.folder)) == (3 if moment == "export" else 0)
    assert not (run.folder / "model").exists()
    assert "continues after its last checkpoint" in run.text
    assert next(reversed(list(read_rows(run.folder / "journal.jsonl"))))["event"] == "closed"


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
def test_one_that_does_not_wait_for_workers_ends_the_process(start, terminal):
    before = descendants()
    run = start("closing", terminal)
    run.until("at closing")
    run.press()
    run.until(CLOSING)
    run.press()
    assert run.ended() == 130, run.text
    assert not descendants() - before


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_real_workers_outlive_ctrl_c_until_the_step_is_saved(tmp_path, start, launcher):
    if launcher == "ray":
        pytest.importorskip("ray")
    run = start("evaluation", True, backend={"use": "fsdp2", "optimizer": {"lr": 1.0e-3}}, generator={"use": "hf"},
                cluster={"launcher": launcher, "threads": {"backend": 1, "generator": 1}})  # fmt: skip
    run.until("at evaluation")
    run.press()
    run.until("Ctrl-C: finishing the evaluation after step 2, then saving")
    run.go.touch()
    assert run.ended() == 130, run.text
    assert "Traceback" not in run.text
    assert checkpoint.newest(RunFolder(run.folder)) == 2
