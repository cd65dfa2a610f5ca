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
from typing import Any

import pytest
from attrs import frozen

from whet.data.files import read_rows
from whet.run import checkpoint
from whet.run.run_folder import RunFolder
from whet_testing.forking import Program
from whet_testing.processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]

PAUSING = Path(__file__).parent / "pausing.py"
AGAIN = "; Ctrl-C again ends at once, without saving"
CLOSING = "closing the workers; Ctrl-C again does not wait for them"


@frozen
class Run:
    """A run under way, and the end at which its output is read."""

    process: subprocess.Popen | Program
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


COMMAND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell withholds it from what runs in its background
if terminal := sys.argv.pop(1):
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)  # the first one that a session opens is its own: Ctrl-C there reaches it
    for place in (0, 1, 2):
        os.dup2(opened, place)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(place, mode, 1) for place, mode in enumerate("rww"))
from whet.cli import main
from whet_testing.forked_children import forked_children
with forked_children():
    main()
"""


@pytest.fixture
def start(tmp_path, small_run, programs):
    """Start a run that stops at a moment. `anew`: by a new start of Python."""
    started: list[Run] = []

    def run(moment: str, terminal: bool = False, anew: bool = False, **sections) -> Run:
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
        ours, theirs = pty.openpty() if terminal else (-1, -1)
        words = [os.ttyname(theirs) if terminal else "", "run", str(config)]
        variables = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
        process: Any
        if anew:
            command = [sys.executable, "-c", COMMAND, *words]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables)
        else:
            process = programs.start(COMMAND, words, variables=variables)
        started.append(Run(process, ours if terminal else process.stdout.fileno(), terminal, tmp_path / "run", go, []))
        if terminal:
            started[-1].until(r"\S")  # it has opened the terminal
            os.close(theirs)
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()
        one.process.stdout.close()
        if one.terminal:
            os.close(one.reader)


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
    run = start(moment, terminal, anew=moment == "start-up")
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
