"""Programs and workers that are forks keep what belongs to a process."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whet.runtime.local import LocalCluster
from whet_testing.forked_children import forked_children
from whet_testing.forking import Programs
from whet_testing.scripted_worker import TARGET


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with Programs(["attrs"]) as started:
        yield started


def test_a_program_has_its_arguments_folder_variables_output_and_code(programs: Programs, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['HELLO']); sys.stderr.write('no'); sys.exit(3)"
    done = programs.run(code, ["a", "b"], folder=tmp_path, variables={"HELLO": "you"})
    assert (done.returncode, done.stdout, done.stderr) == (3, f"['a', 'b'] {tmp_path} you\n", "no")


def test_programs_run_beside_each_other_and_end_as_they_do(programs: Programs) -> None:
    waiting = programs.start("import sys; print('here', flush=True); sys.stdin.read(); import time; time.sleep(60)", [])
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == b"here\n"
    ended = programs.start("print('over')", [])
    assert ended.communicate(timeout=60) == ("over\n", None)
    assert ended.returncode == 0
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.0)
    waiting.kill()
    assert waiting.wait(60) == waiting.poll() == -signal.SIGKILL
    waiting.kill()  # nothing is left to kill
    waiting.communicate(timeout=60)


def test_a_program_that_takes_too_long_shows_where_it_stands(programs: Programs) -> None:
    code = """
def stands():
    import time
    time.sleep(600)
stands()
"""
    with pytest.raises(subprocess.TimeoutExpired) as late:
        programs.run(code, [], seconds=5.0)
    assert "in stands" in late.value.__notes__[0]


OWNER = """
import os, time
from whet_testing.forking import Programs
programs = Programs(["attrs"])
if not (child := os.fork()):
    time.sleep(600)
print(programs._server.pid, child, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("no_orphans")
def test_the_server_ends_with_its_owner_although_a_child_of_the_owner_lives_on() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server, child = map(int, owner.stdout.readline().split())
        ended = os.pidfd_open(server)
        owner.kill()
    try:
        assert select.select([ended], [], [], 60.0)[0]
    finally:
        os.close(ended)
        os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("no_orphans")
def test_a_worker_that_is_forked_is_a_process_with_a_session_and_a_log_of_its_own(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        with forked_children(), LocalCluster(tmp_path / "logs") as cluster:
            workers = cluster.worker_group("actor").spawn(TARGET, {"offset": 3})
            assert workers.call("add", 4) == [7]
            pid = workers.call("state")[0]["pid"]
            assert pid != os.getpid()
            assert os.getsid(pid) == pid
            assert os.getpgid(pid) == pid
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            assert b"whet.runtime.worker_process" in command
            opened = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            assert os.readlink(f"/proc/self/fd/{writer}") not in opened, "it keeps a pipe of its parent open"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.usefixtures("no_orphans")
def test_a_worker_that_is_forked_dies_with_the_process_that_forked_it(tmp_path: Path, programs: Programs) -> None:
    code = """
import signal, sys, os
from pathlib import Path
from whet.runtime.local import LocalCluster
from whet_testing.forked_children import forked_children
from whet_testing.scripted_worker import TARGET
with forked_children(), LocalCluster(Path(sys.argv[1])) as cluster:
    workers = cluster.worker_group("actor").spawn(TARGET, {})
    print(workers.call("state")[0]["pid"], flush=True)
    signal.pause()
"""
    driver = programs.start(code, [str(tmp_path)])
    assert driver.stdout is not None
    worker = os.pidfd_open(int(driver.stdout.readline()))
    try:
        driver.kill()
        driver.communicate(timeout=60)
        ended = select.poll()
        ended.register(worker, select.POLLIN)
        assert ended.poll(60_000)
    finally:
        os.close(worker)


@pytest.mark.usefixtures("no_orphans")
def test_a_worker_that_is_forked_leaves_to_its_parent_what_the_parent_registered(
    tmp_path: Path, programs: Programs
) -> None:
    code = """
import atexit, os, sys
from pathlib import Path
from whet.runtime.local import LocalCluster
from whet_testing.forked_children import forked_children
from whet_testing.scripted_worker import TARGET

class Freed:
    def __del__(self):
        os.abort()

def note(freed):
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid() == owner} ")

owner = os.getpid()
atexit.register(note, Freed())
with forked_children(), LocalCluster(Path(sys.argv[2])) as cluster:
    workers = cluster.worker_group("actor").spawn(TARGET, {"offset": 3})
    assert workers.call("add", 4) == [7]
note(None)
os._exit(0)
"""
    assert programs.run(code, [str(tmp_path / "noted"), str(tmp_path / "logs")]).returncode == 0
    assert (tmp_path / "noted").read_text() == "True "


def test_another_program_is_started_and_not_forked(tmp_path: Path) -> None:
    from whet.runtime import process

    with forked_children():
        done = process.subprocess.Popen([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE)
        assert isinstance(done, subprocess.Popen)
        assert done.communicate()[0] == b"1\n"
