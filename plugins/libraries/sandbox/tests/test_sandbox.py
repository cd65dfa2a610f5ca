"""A program in a sandbox always comes to a result that names what it did. A sandbox that breaks raises."""

import asyncio
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.errors import InfrastructureError
from whet_sandbox.config import DockerConfig, NamespacesConfig
from whet_sandbox.docker import Docker
from whet_sandbox.isolation import seccomp
from whet_sandbox.limits import Limits
from whet_sandbox.namespaces import Namespaces
from whet_sandbox.provider import Provider, SandboxBroken
from whet_sandbox.sandbox import ProgramEnded, Result, Sandbox, Session, _is_lost
from whet_testing.contracts.workers import wait_until
from whet_testing.processes import survivors

LIMITS = Limits(cpu_seconds=1.0, wall_seconds=60.0, memory_mib=256)
ECHO = """
import os
print("begins", flush=True)
with open(3) as questions, open(4, "w") as answers:
    for line in questions:
        exec(line)
        print(end='', flush=True)
        print(line.strip().upper(), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(Namespaces(NamespacesConfig(warm=2, at_once=8)), LIMITS)
    yield sandbox
    sandbox.close()


def run(sandbox: Sandbox, *args: Any, **keywords: Any) -> Result:
    return asyncio.run(sandbox.run(*args, **keywords))


def in_session(sandbox: Sandbox, play: Callable[[Session], Awaitable[Any]], limits: Limits | None = None) -> Any:
    async def whole() -> Any:
        async with sandbox.session(limits) as session:
            return await play(session)

    return asyncio.run(whole())


def test_a_program_gets_files_and_input_and_gives_output_and_files(sandbox: Sandbox) -> None:
    code = """
import sys, pathlib
from folder.module import value
pathlib.Path("out.txt").write_text(sys.stdin.read() + str(value))
print("printed"); print("warned", file=sys.stderr); sys.exit(3)"""
    files = {"folder/module.py": "value = 7", "folder/__init__.py": b""}
    result = run(sandbox, code=code, files=files, stdin="given", collect=["out.txt", "absent"])
    assert result == Result("exit", 3, "printed\n", "warned\n", {"out.txt": b"given7"})
    assert not result.ok


def test_any_program_of_the_machine_can_run(sandbox: Sandbox) -> None:
    assert run(sandbox, ["/bin/sh", "-c", "echo $HOME; pwd; id -u"]).stdout == "/box\n/box\n1000\n"


def test_python_has_its_library_and_no_package_of_the_machine(sandbox: Sandbox) -> None:
    code = """
import sys, os, subprocess, sqlite3, zoneinfo, asyncio, decimal, multiprocessing
print(sys.prefix, [name for name in sys.modules if "certifi" in name or "distutils" in name], callable(exit))
print([path for path in sys.path if "packages" in path and os.path.isdir(path)])
print(subprocess.run(["python3", "-c", "print(1)"], capture_output=True, text=True).stdout)
async def main(): return (await asyncio.create_subprocess_exec("/bin/true")).pid > 0
print(asyncio.run(main()), multiprocessing.Pool(2).map(abs, [-1, 2]))
exit(3)"""
    result = run(sandbox, code=code, limits=Limits(memory_mib=1024))
    assert (result.stdout, result.exit) == ("/python [] True\n[]\n1\n\nTrue [1, 2]\n", 3), result


def test_megabytes_of_input_reach_a_program_that_writes_meanwhile(sandbox: Sandbox) -> None:
    data = os.urandom(1 << 20).hex()
    limits = Limits(output_kib=4096, files_kib=4096, memory_mib=256)
    result = run(sandbox, ["/bin/cat"], stdin=data, limits=limits)
    assert result.stdout == data


def test_a_program_that_does_not_read_its_input_is_no_failure(sandbox: Sandbox) -> None:
    assert run(sandbox, ["/bin/true"], stdin=b"x" * (1 << 20)).ok


def test_output_that_is_no_text_is_shown_as_far_as_it_is(sandbox: Sandbox) -> None:
    result = run(sandbox, code=r"import os; os.write(1, b'\xff\x00\x1b[2Jx')")
    assert result.stdout == "\ufffd\x00\x1b[2Jx"


@pytest.mark.parametrize(
    ("make", "collected"),
    [
        ("open('out', 'w').write('x')", True),
        ("os.symlink('/etc/passwd', 'out')", False),
        ("os.symlink('main.py', 'out')", False),
        ("os.link('main.py', 'out')", False),
        ("os.mkdir('out')", False),
        ("os.truncate(os.open('out', os.O_CREAT | os.O_RDWR), 1 << 23)", False),
        ("open('out', 'w').write('x'); os.chmod('out', 0)", False),
        ("open('out', 'w').write('x'); os.chmod('/box', 0)", False),
        ("import socket; socket.socket(socket.AF_UNIX).bind('out')", False),
    ],
)
def test_only_plain_files_are_fetched(sandbox: Sandbox, make: str, collected: bool) -> None:
    result = run(sandbox, code=f"import os\n{make}", collect=["out"])
    assert result.ok
    assert ("out" in result.files) == collected


def test_a_link_to_a_folder_leads_nowhere(sandbox: Sandbox) -> None:
    assert run(sandbox, code="import os; os.symlink('/etc', 'd')", collect=["d/passwd"]).files == {}


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a//b", "./x", "a\0b"])
def test_a_path_out_of_the_folder_is_refused(sandbox: Sandbox, path: str) -> None:
    for keywords in ({"files": {path: "x"}}, {"collect": [path]}):
        with pytest.raises(ValueError, match="relative path"):
            run(sandbox, ["/bin/true"], **keywords)


def test_programs_see_nothing_of_earlier_programs(sandbox: Sandbox) -> None:
    leave = "for f in ('/box/x', '/tmp/x', '/dev/shm/x'): open(f, 'w').write('x')"
    assert run(sandbox, code=leave).ok
    look = "import os; print([os.listdir(f) for f in ('/box', '/tmp', '/dev/shm')])"
    assert run(sandbox, code=look).stdout == "[['main.py'], [], []]\n"


def test_a_session_keeps_files_and_ends_processes(sandbox: Sandbox) -> None:
    async def play(session: Session) -> None:
        assert (
            await session.run(code="import subprocess; subprocess.Popen(['/bin/sh', '-c', 'sleep 0.2; echo x > late'])")
        ).ok
        assert (await session.run(code="open('kept', 'w').write('1')")).ok
        look = (
            "import time, os; time.sleep(0.5)\n"
            "print(sorted(os.listdir()), len([p for p in os.listdir('/proc') if p.isdigit()]))"
        )
        assert (await session.run(code=look)).stdout == "['kept', 'main.py'] 1\n"

    in_session(sandbox, play)


@pytest.mark.parametrize(
    "spoil",
    [
        "import os; os.chmod('/box', 0)",
        "import os; os.unlink('main.py'); os.mkdir('main.py')",
        "open('fill', 'wb').write(bytes(8 << 20)); open('/tmp/fill', 'wb').write(bytes(9 << 20))",
    ],
)
def test_a_program_that_spoils_its_session_is_no_failure_of_the_sandbox(sandbox: Sandbox, spoil: str) -> None:
    async def play(session: Session) -> Result:
        await session.run(code=spoil)
        return await session.run(code="print('runs')" + "#" * 100_000)

    assert in_session(sandbox, play).why == "spoiled"


def test_a_program_answers_and_keeps_its_state(sandbox: Sandbox) -> None:
    async def play(session: Session) -> None:
        await session.start(code=ECHO)
        first = await session.ask(b"x = 1")
        second = await session.ask(b"print(x)")
        assert (first.line, first.stdout) == (b"X = 1", "begins\n")
        assert (second.line, second.stdout) == (b"PRINT(X)", "1\n")
        assert (await session.stop()).why == "stopped"
        assert (await session.run(["/bin/true"])).ok

    in_session(sandbox, play)


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("import os; os._exit(5)", "exit"),
        ("while True: pass", "cpu"),
        ("import time; time.sleep(100)", "wall"),
        ("import os; os.close(4); time = __import__('time'); time.sleep(100)", "wall"),
        ("answers.write('x' * (3 << 20)); answers.flush()", "answer"),
        ("while True: print('x' * 1000)", "output"),
        ("import os; os.kill(os.getpid(), 9)", "signal"),
        ("raise SystemExit", "exit"),
    ],
)
def test_a_program_that_does_not_answer_is_named(sandbox: Sandbox, question: str, why: str) -> None:
    async def play(session: Session) -> Result:
        await session.start(code=ECHO)
        with pytest.raises(ProgramEnded) as caught:
            await session.ask(question.encode(), wall_seconds=2.0 if why == "wall" else None)
        return caught.value.result

    assert in_session(sandbox, play).why == why


def test_a_program_is_watched_while_nobody_asks(sandbox: Sandbox) -> None:
    async def play(session: Session) -> Result:
        mark = f"spins-{os.getpid()}"
        await session.start(["/usr/bin/env", "python3", "-c", ECHO, mark])
        spin = "import threading; threading.Thread(target=lambda: exec('while True: pass'), daemon=True).start()"
        await session.ask(spin.encode())
        assert _running(mark)
        await asyncio.to_thread(wait_until, lambda: not _running(mark), "the program is stopped")
        with pytest.raises(ProgramEnded) as caught:
            await session.ask(b"0")
        return caught.value.result

    assert in_session(sandbox, play).why == "cpu"


def test_many_programs_at_a_time_on_few_places(sandbox: Sandbox) -> None:
    async def whole() -> list[Result]:
        return await asyncio.gather(*[sandbox.run(code=f"print({i})") for i in range(24)])

    assert [result.stdout for result in asyncio.run(whole())] == [f"{i}\n" for i in range(24)]


def test_a_cancelled_program_ends(sandbox: Sandbox) -> None:
    mark = f"mark-{os.getpid()}"

    async def whole() -> None:
        task = asyncio.create_task(sandbox.run(["/bin/sh", "-c", f"sleep 1000 #{mark}"]))
        await asyncio.to_thread(wait_until, lambda: _running(mark), "the program runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(whole())
    wait_until(lambda: not _running(mark), "the program is gone")


def _running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def test_a_launcher_that_dies_is_infrastructure_and_the_next_program_runs() -> None:
    sandbox, mark = Sandbox(provider := Namespaces(NamespacesConfig(warm=1)), LIMITS), f"dies-with-it-{os.getpid()}"
    try:

        async def whole() -> None:
            task = asyncio.create_task(sandbox.run(["/bin/sh", "-c", f"sleep 1000 #{mark}"]))
            await asyncio.to_thread(wait_until, lambda: _running(mark), "the program runs")
            assert provider._launcher is not None
            provider._launcher.kill()
            with pytest.raises(SandboxBroken, match="lost"):
                await task

        asyncio.run(whole())
        wait_until(lambda: not _running(mark), "the program is gone")
        wait_until(lambda: all(map(_is_lost, sandbox._waiting)), "the sandboxes that were warm are gone")
        assert run(sandbox, code="print(1)").ok
    finally:
        sandbox.close()


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_program_outlives_its_driver(how: signal.Signals) -> None:
    mark = f"its-driver-ends-{os.getpid()}"
    driver = """
import asyncio, os
from whet_sandbox.config import NamespacesConfig
from whet_sandbox.namespaces import Namespaces
from whet_sandbox.sandbox import Sandbox
asyncio.run(Sandbox(Namespaces(NamespacesConfig())).run(["/bin/sh", "-c", "sleep 1000 #" + os.environ["MARK"]]))
"""
    process = subprocess.Popen([sys.executable, "-c", driver], env={**os.environ, "MARK": mark})
    wait_until(lambda: _running(mark), "the program runs")
    process.send_signal(how)
    process.wait(10.0)
    wait_until(lambda: not _running(mark), "the program is gone")


@pytest.mark.usefixtures("no_orphans")
def test_close_ends_everything_and_further_programs_are_refused() -> None:
    sandbox = Sandbox(Namespaces(NamespacesConfig(warm=3)), LIMITS)
    assert run(sandbox, ["/bin/true"]).ok
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxBroken, match="closed"):
        run(sandbox, ["/bin/true"])


class Without(Namespaces):
    """A provider on a machine whose kernel lacks something: its launcher runs some code first."""

    def __init__(self, code: str) -> None:
        super().__init__(NamespacesConfig(warm=0))
        self._code = code

    def _start(self) -> None:
        from whet_sandbox import namespaces

        program = namespaces._PROGRAM
        try:
            namespaces._PROGRAM = program.replace("launcher.main", f"{self._code}\nlauncher.main")  # type: ignore[misc]
            super()._start()
        finally:
            namespaces._PROGRAM = program  # type: ignore[misc]


LATE = """
import os, time
fork, launcher_process = os.fork, os.getpid()
def late():
    pid = fork()
    while pid == 0 and os.getppid() == launcher_process:
        time.sleep(0.01)
    return pid
os.fork = late
"""


@pytest.mark.usefixtures("no_orphans")
def test_a_supervisor_ends_with_a_launcher_that_ended_before_its_first_step() -> None:
    provider = Without(LATE)
    connection = provider.open(LIMITS)
    try:
        launcher = provider._launcher
        assert launcher is not None
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        wait_until(lambda: bool(children.read_text()), "the launcher has made the supervisor")
        launcher.kill()
        wait_until(lambda: _is_lost(connection), "the supervisor has ended")
    finally:
        connection.close()
        provider.close()


FORBID = """
from whet_sandbox.isolation import kernel, seccomp
def fail(*args): raise PermissionError(1, 'Operation not permitted')
"""


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(
    ("code", "named"),
    [
        (FORBID + "kernel.unshare = fail", "a new user namespace failed: .*not permitted"),
        (FORBID + "kernel.mount = fail", "the private root failed"),
        (FORBID + "kernel.drop_capabilities = fail", "did not mount its /proc|giving up capabilities failed"),
        (FORBID + "seccomp.apply = fail", "the filter of system calls: PermissionError"),
        (FORBID + "seccomp.MACHINE = 'riscv64'", "no filter of system calls for riscv64"),
        ("import os; launcher._OLDEST_KERNEL = (99, 0)", r"it needs Linux 99\.0"),
    ],
)
def test_nothing_runs_where_a_wall_is_missing(code: str, named: str, tmp_path: Path) -> None:
    sandbox = Sandbox(Without(code), LIMITS)
    try:
        with pytest.raises(SandboxBroken, match=named) as caught:
            run(sandbox, code="print('it runs')")
        assert isinstance(caught.value, InfrastructureError)
        assert "it runs" not in str(caught.value)
        assert sandbox.why_not() != ""
    finally:
        sandbox.close()


def test_a_machine_that_can_gives_no_reason_why_not(sandbox: Sandbox) -> None:
    assert sandbox.why_not() == ""


def test_a_program_that_is_not_there_is_not_scored(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxBroken, match="/no/such: FileNotFoundError"):
        run(sandbox, ["/no/such"])


def test_further_folders_are_readable_and_packages_importable(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "own_module.py").write_text("value = 5")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("data")
    config = NamespacesConfig(warm=0, packages=[str(tmp_path / "packages")], readable=[str(tmp_path / "data")])
    sandbox = Sandbox(Namespaces(config), LIMITS)
    try:
        code = f"import own_module; print(own_module.value, open({str(tmp_path / 'data' / 'x')!r}).read())"
        assert run(sandbox, code=code).stdout == "5 data\n"
        assert "Permission denied" in run(sandbox, code=f"open({str(tmp_path / 'data' / 'x')!r}, 'a')").stderr
    finally:
        sandbox.close()


def test_a_warm_sandbox_starts_a_program_in_time(sandbox: Sandbox) -> None:
    """The median stays below 50 ms, from the call to the result, on a machine that is not overloaded."""
    times = []
    for _ in range(15):
        time.sleep(0.05)
        began = time.perf_counter()
        assert run(sandbox, code="").ok
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 0.05 * max(1.0, os.getloadavg()[0])


def test_a_hundred_at_a_time_have_no_failure_of_their_own() -> None:
    sandbox = Sandbox(Namespaces(NamespacesConfig(at_once=100, warm=0)), LIMITS)

    async def whole() -> list[Result]:
        return await asyncio.gather(*[sandbox.run(code="import time; time.sleep(1); print(1)") for _ in range(100)])

    try:
        assert all(result.ok for result in asyncio.run(whole()))
    finally:
        sandbox.close()


def test_waiting_for_a_sandbox_counts_against_no_deadline_of_an_episode() -> None:
    from whet.rollout.gate import Gate as Rollouts
    from whet_sandbox.gate import Gate

    async def scene() -> list[str]:
        rollouts, gate, ended = Rollouts(), Gate(1), list[str]()

        async def episode(name: str, seconds: float) -> None:
            try:
                async with rollouts.time_limit(0.2), gate.place():
                    await asyncio.sleep(seconds)
                ended.append(f"{name}: in time")
            except TimeoutError:
                ended.append(f"{name}: too late")

        async with gate.place():
            others = [asyncio.create_task(episode(name, seconds)) for name, seconds in (("a", 60.0), ("b", 0.0))]
            await asyncio.sleep(0.5)  # longer than their deadline
        await asyncio.gather(*others)
        return ended

    assert asyncio.run(scene()) == ["a: too late", "b: in time"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_many_executions_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WHET_EXECUTIONS sets how many; by default few."""
    count = int(os.environ.get("WHET_EXECUTIONS", "60"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mounts, name = Path("/proc/self/mounts").read_text(), f"left-behind-{os.getpid()}"
    before, descriptors = survivors(frozenset()), len(os.listdir("/proc/self/fd"))
    sandbox = Sandbox(Namespaces(NamespacesConfig(at_once=4, warm=4)), LIMITS)
    code = (
        "import subprocess; subprocess.Popen(['/bin/sleep', '1000'], start_new_session=True)\n"
        f"for folder in ('/tmp', '/box', '/dev/shm'): open(folder + '/{name}', 'w').write('x')"
    )

    async def whole() -> None:
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                assert (await sandbox.run(code=code)).ok

        await asyncio.gather(*[worker() for _ in range(4)])

    asyncio.run(whole())
    sandbox.close()
    assert not survivors(before, patience_seconds=5.0)
    assert Path("/proc/self/mounts").read_text() == mounts
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.listdir(tmp_path) == []
    assert not [folder for folder in ("/tmp", "/box", "/dev/shm", ".") if os.path.exists(f"{folder}/{name}")]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_as_long_as_the_kernel_takes_and_jumps_stay_inside(machine: str) -> None:
    code = seccomp.program(machine)
    assert len(code) % 8 == 0
    length = len(code) // 8
    assert length <= 4096
    for at in range(length):
        kind, yes, no = int.from_bytes(code[8 * at : 8 * at + 2], "little"), code[8 * at + 2], code[8 * at + 3]
        if kind & 7 == 5:
            assert max(at + 1 + yes, at + 1 + no) < length


def test_a_container_has_no_network_no_rights_and_limits() -> None:
    command = Docker(DockerConfig(runtime="runsc", image="some/image")).command("name", Limits(disk_mib=9, processes=7))
    words = " ".join(command)
    wanted = ("--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--pull never")
    for option in (*wanted, "--ipc none", "--pids-limit 15", "size=9m", "--runtime runsc", "--memory 1024m"):
        assert option in words


@pytest.fixture(scope="module")
def container() -> Iterator[Sandbox]:
    """The supervisor as process 1 of a container that is no container of Docker's; see `container.sh`."""
    if shutil.which("unshare") is None or not os.path.exists("/usr/bin/python3"):
        pytest.skip("there is no unshare or no /usr/bin/python3 to stand in for a container")
    command = str(Path(__file__).with_name("container.sh"))
    sandbox = Sandbox(Docker(DockerConfig(command=command, python="/usr/bin/python3", warm=1)), LIMITS)
    yield sandbox
    sandbox.close()


MUCH_MEMORY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        data = bytearray(b"x" * (60 << 20)); time.sleep(9)
time.sleep(9)"""
AT_PROCESS_1 = """
import os
for number in (2, 9, 15, 19, 1, 10):
    try: os.kill(1, number)
    except OSError: pass
try: print(os.readlink("/proc/1/fd/0"), open("/proc/1/mem", "rb"))
except OSError as error: print("stopped", type(error).__name__)"""


@pytest.mark.parametrize(
    ("code", "why", "stdout"),
    [
        ("print(6 * 7)", "exit", "42\n"),
        ("while True: pass", "cpu", ""),
        (MUCH_MEMORY, "memory", ""),
        (AT_PROCESS_1, "exit", "stopped PermissionError\n"),
        ("import socket; socket.socket(socket.AF_INET); print('ESCAPED')", "exit", ""),
    ],
)
def test_the_supervisor_of_a_container_names_what_a_program_did(
    container: Sandbox, code: str, why: str, stdout: str
) -> None:
    result = run(container, code=code)
    assert (result.why, result.stdout) == (why, stdout)


def test_a_session_in_a_container_keeps_files_and_ends_processes(container: Sandbox) -> None:
    async def play(session: Session) -> None:
        await session.start(code=ECHO)
        await session.ask(b"open('kept', 'w').write('x')")
        child = b"import subprocess; subprocess.Popen(['/bin/sleep', '1000'], start_new_session=True)"
        await session.ask(child)
        assert (await session.stop(collect=["kept"])).files == {"kept": b"x"}
        look = "import os; print([p for p in os.listdir('/proc') if p.isdigit() and p not in ('1', str(os.getpid()))])"
        assert (await session.run(code=look)).stdout == "[]\n"

    in_session(container, play)


def test_a_container_that_cannot_be_started_is_infrastructure(tmp_path: Path) -> None:
    fails = tmp_path / "docker"
    fails.write_text("#!/bin/sh\necho 'no daemon is running' >&2\nexit 125\n")
    fails.chmod(0o755)
    for command, reason in (
        (str(fails), "code 125: no daemon is running"),
        (str(tmp_path / "absent"), "cannot be started"),
    ):
        sandbox = Sandbox(Docker(DockerConfig(command=command, warm=0)), LIMITS)
        try:
            with pytest.raises(SandboxBroken, match=reason):
                run(sandbox, code="print(1)")
        finally:
            sandbox.close()


def test_providers_keep_the_contract() -> None:
    assert isinstance(Namespaces(NamespacesConfig()), Provider)
    assert isinstance(Docker(DockerConfig()), Provider)
