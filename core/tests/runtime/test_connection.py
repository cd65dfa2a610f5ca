"""Many connections at once, each to a real process and over a real socket; the processes say nothing."""

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.errors import WorkerError
from whet.runtime.channel import Line, send
from whet.runtime.connection import Call, Connection, end_all
from whet.runtime.deadlines import DeadlineWatch
from whet.runtime.traffic import Traffic
from whet.runtime.wire import encode
from whet_testing.contracts.workers import wait_until


class Silent:
    """A `HostProcess` that has said once that it lives."""

    def __init__(self, state: Callable[[], str]) -> None:
        self.pid, self.state = 0, state

    def line(self, *ends: Any) -> Line:
        return Line(*ends)

    def start(self) -> socket.socket:
        self._process = subprocess.Popen(["sleep", "60"])
        self.pid = self._process.pid
        mine, self._theirs = socket.socketpair()
        send(self._theirs, encode({"number": 0, "say": "alive", "value": {"doing": "", "seconds": 0.0}}))
        return mine

    def wait(self) -> str:
        code = self._process.wait()
        self._theirs.close()
        return f"its process exited with code {code}"

    def kill(self) -> None:
        self._process.kill()

    def show_stacks(self) -> None:
        pass


Connect = Callable[[str, Callable[[], str]], Connection]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    deadline_watch, traffic, made = DeadlineWatch(), Traffic(), []

    def one(name: str, state: Callable[[], str]) -> Connection:
        connection = Connection(name, tmp_path / f"{name}.log", Silent(state), deadline_watch.alarm, traffic)
        deadline_watch.watch(connection)
        made.append(connection)
        return connection

    yield one
    for connection in made:
        end_all([connection], 0.0)
    deadline_watch.stop()
    traffic.stop()


def errors_of(connections: list[Connection], seconds: float, patience: float) -> list[WorkerError]:
    """Ask all for something that none answers, and give the errors in the order in which they come."""
    errors: list[WorkerError] = []
    all_told = threading.Event()

    def done(value: object, error: WorkerError | None) -> None:
        assert error is not None
        errors.append(error)
        if len(errors) == len(connections):
            all_told.set()

    for connection in connections:
        assert connection.pid
    for rank, connection in enumerate(connections):
        connection.ask(rank + 1, encode({"number": rank + 1}), Call("backend", rank, "train", seconds, done))
    assert all_told.wait(seconds + patience), f"only {len(errors)} of {len(connections)} calls have failed by now"
    return errors


def test_a_hundred_ranks_that_miss_a_deadline_are_asked_at_once(connect: Connect) -> None:
    def slow() -> str:
        time.sleep(0.2)  # 20 s for all of them, one after another
        return "S"

    assert len(errors_of([connect(f"backend-{rank}", slow) for rank in range(100)], 1.0, 5.0)) == 100


def test_a_process_of_which_nothing_can_be_known_holds_up_no_deadline(connect: Connect) -> None:
    never = threading.Event()
    stuck = connect("backend-0", lambda: str(never.wait(30.0)))
    stopped = connect("backend-1", lambda: "T")
    errors = errors_of([stuck, stopped], 0.3, 5.0)
    never.set()
    assert [error.rank for error in errors] == [1, 0]
    assert "no answer within 0.3 s; its process is stopped" in str(errors[0])


def test_a_traceback_that_is_written_after_the_stacks_is_no_part_of_them(connect: Connect, tmp_path: Path) -> None:
    connection = connect("backend-0", lambda: "S")
    stacks = 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in work\n  File "b.py", line 2 in run\n'
    unfinished = 'Traceback (most recent call last):\n  File "a.py", line 1, in work\n'
    written = tmp_path / "backend-0.log"
    connection.process.show_stacks = lambda: written.write_text(stacks + unfinished)  # type: ignore[method-assign]
    assert connection.pid
    wait_until(lambda: bool(connection._heard), "the process has said that it lives")
    assert connection.last_words() == stacks.rstrip()


def test_processes_that_do_not_end_are_all_killed_before_their_ends_are_waited_for() -> None:
    told: list[str] = []

    class Late:
        def __init__(self, name: str) -> None:
            self.name, self.process = name, self

        def gone_by(self, deadline: float) -> bool:
            told.append(f"{self.name} waited for")
            return False

        def kill(self) -> None:
            told.append(f"{self.name} killed")

    end_all([Late("a"), Late("b")], 0.0)  # type: ignore[list-item]
    waited = ["a waited for", "b waited for"]
    assert told == [*waited, "a killed", "b killed", *waited]
