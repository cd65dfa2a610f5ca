"""Troubles other than a signal at a random moment; each gives the faults that it found."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs
from judge import NOISE, ended_faults
from run_attempt import DEADLINE, SLOWNESS, STEPS, RunAttempt, Subject
from strikes import PATIENCE
from victims import Victim, victims


def two_drivers(subject: Subject, undisturbed: Path) -> list[str]:
    """A second driver on the same folder is refused, and the first never notices."""
    first = RunAttempt(subject)
    wait_for(first, "after.step")
    second = RunAttempt(subject, 1)
    faults = ends(second, 1, r"is in use by another run")
    return faults + ends(first, 0) + ended_faults(subject, undisturbed)


def terminated_with_all(subject: Subject, undisturbed: Path) -> list[str]:
    """A job manager sends SIGTERM to every process: the run saves, says so, and goes on later."""
    attempt = RunAttempt(subject)
    wait_for(attempt, "backend.train", 3)
    with looked() as found:
        for victim in found:
            victim.strike(signal.SIGTERM)
    # Ray's own processes end by SIGTERM, and take the workers along.
    codes = (143, 1) if subject.launcher == "ray" else 143
    return ends(attempt, codes, "continues") + resumes(subject, undisturbed)


def terminated_while_saving(subject: Subject, undisturbed: Path) -> list[str]:
    """SIGTERM, twice, while a checkpoint is written."""
    attempt = RunAttempt(subject, 0, "run.save_every=1")
    wait_for(attempt, "run.save", 2)
    for _ in range(2):
        attempt.process.send_signal(signal.SIGTERM)
    return ends(attempt, 143, "continues") + resumes(subject, undisturbed)


def interrupted_twice(subject: Subject, undisturbed: Path) -> list[str]:
    """Ctrl-C twice ends a run at once; it goes on after its last checkpoint."""
    attempt = RunAttempt(subject)
    wait_for(attempt, "backend.train", 4)
    for _ in range(2):
        attempt.process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    return ends(attempt, 130) + resumes(subject, undisturbed)


def interrupted_with_reader(subject: Subject, undisturbed: Path) -> list[str]:
    """Ctrl-C reaches all of `whet run it.yaml 2>&1 | tee log`: what reads is gone before the run has ended."""
    attempt = RunAttempt(subject, 0, through="tee /dev/null")
    wait_for(attempt, "backend.train", 3)
    os.killpg(attempt.process.pid, signal.SIGINT)
    faults = ends(attempt, (130, -signal.SIGINT))
    while left := [victim.name for victim in _all()]:  # bash, which started both, may have ended first
        time.sleep(0.05)
        if time.monotonic() - attempt.began > 100:
            return [f"{left} go on"]
    if not any(subject.run.glob("checkpoints/step-*")):
        faults.append("nothing was saved")
    return [fault for fault in faults + resumes(subject, undisturbed) if "logger console" not in fault]


def hung_up(subject: Subject, undisturbed: Path) -> list[str]:
    """The terminal is closed."""
    attempt = RunAttempt(subject)
    wait_for(attempt, "backend.train", 2)
    attempt.process.send_signal(signal.SIGHUP)
    return ends(attempt, (-signal.SIGHUP, 128 + signal.SIGHUP)) + resumes(subject, undisturbed)


def hung_up_under_nohup(subject: Subject, undisturbed: Path) -> list[str]:
    """The terminal is closed, and the run was started so that it does not mind."""
    attempt = RunAttempt(subject, deaf_to=[signal.SIGHUP])
    wait_for(attempt, "backend.train", 2)
    attempt.process.send_signal(signal.SIGHUP)
    return ends(attempt, 0) or ended_faults(subject, undisturbed)


def nobody_reads(subject: Subject, undisturbed: Path) -> list[str]:
    """What reads the output goes away, as `head` does."""
    faults = ends(RunAttempt(subject, 0, through="head -n 1"), 0) or ended_faults(subject, undisturbed)
    return [fault for fault in faults if "logger console" not in fault]  # it is dropped, and the journal says so


def no_terminal(subject: Subject, undisturbed: Path) -> list[str]:
    """Standard output and error are closed before the start."""
    attempt = RunAttempt(subject, 0, prefix=("sh", "-c", 'exec "$0" "$@" >&- 2>&-'))
    return ends(attempt, 0) or ended_faults(subject, undisturbed)


def killed_in_shutdown(subject: Subject, undisturbed: Path) -> list[str]:
    """The driver is killed when all is done but the end: the next start finds nothing left to do."""
    for number in range(3):
        attempt = RunAttempt(subject, number)
        wait_for(attempt, "after.exported" if number == 0 else "after.opened")
        time.sleep(0.01 * number)
        attempt.process.kill()
        attempt.process.wait()
    return resumes(subject, undisturbed)


def killed_in_export(subject: Subject, undisturbed: Path) -> list[str]:
    """The driver is killed while it writes the final model."""
    for number in range(2):
        attempt = RunAttempt(subject, number)
        if number == 0:
            wait_for(attempt, "after.saved", STEPS // 2)
        deadline = time.monotonic() + 60
        while not (subject.run / "model.partial").exists() and time.monotonic() < deadline:
            time.sleep(0.0005)
        attempt.process.kill()
        attempt.process.wait()
    return resumes(subject, undisturbed)


def stopped_watchdog(subject: Subject, undisturbed: Path) -> list[str]:
    """The watchdog stands still: the run ends all the same."""
    attempt = RunAttempt(subject)
    wait_for(attempt, "after.step")
    with looked() as found:
        stopped = [victim for victim in found if victim.name == "watchdog" and victim.strike(signal.SIGSTOP)]
        faults = ends(attempt, 0) + ended_faults(subject, undisturbed)
        for victim in stopped:
            victim.strike(signal.SIGCONT)
    return faults + ([] if stopped else ["there was no watchdog"])


def killed_watchdog_and_driver(subject: Subject, undisturbed: Path) -> list[str]:
    """First the watchdog is killed, then the driver: workers and graders are gone all the same."""
    attempt = RunAttempt(subject)
    wait_for(attempt, "after.step")
    with looked() as found:
        for victim in found:
            if victim.name == "watchdog":
                victim.strike(signal.SIGKILL)
    attempt.process.kill()
    attempt.process.wait()
    time.sleep(1.0)
    with looked() as found:
        left = [f"{victim.name} outlived the driver" for victim in found]
    subject.tidy()
    return left + resumes(subject, undisturbed)


def worker_hangs_while_starting(subject: Subject, undisturbed: Path) -> list[str]:
    """A worker stands still before it has answered once."""
    seconds = 20 * SLOWNESS if subject.launcher == "ray" else 6  # Ray starts meanwhile
    attempt = RunAttempt(subject, 0, f"cluster.deadlines.start={seconds:g}")
    wait_for(attempt, "backend.start")
    stopped = False
    while not stopped and attempt.process.poll() is None:
        with looked() as found:
            stopped = any(victim.name == "backend-0" and victim.strike(signal.SIGSTOP) for victim in found)
    error = rf"backend rank 0 failed in start: no answer within {seconds:g} s; its process is stopped"
    return ends(attempt, 1, error) + resumes(subject, undisturbed)


def worker_hangs(subject: Subject, undisturbed: Path) -> list[str]:
    """A worker stands still in the middle: it is missed at its deadline, and the run begins again."""
    attempt = RunAttempt(subject)
    wait_for(attempt, "backend.train", 4)
    with looked() as found:
        stopped = [victim for victim in found if victim.name == "backend-0" and victim.strike(signal.SIGSTOP)]
    faults = ends(attempt, 0) or ended_faults(subject, undisturbed)
    if not re.search(r"rank 0 was lost in \w+: .*no answer within .*; the run goes on after step", attempt.said()):
        faults.append(f"said {attempt.said()[-500:]!r}, wanted who was lost")
    return faults + ([] if stopped else ["there was no worker"])


def taken_ports(subject: Subject, undisturbed: Path) -> list[str]:
    """Others listen on the ports that Ray and torch are known for: whet takes other ones."""
    with listening(*KNOWN_PORTS):
        return ends(RunAttempt(subject), 0) or ended_faults(subject, undisturbed)


def chosen_port_is_taken(subject: Subject, undisturbed: Path) -> list[str]:
    """With the launcher `ray`, another program listens on the port that Ray was told to take."""
    if subject.launcher != "ray":
        return skipped("no port is chosen")
    with listening(0) as (port,):
        attempt = RunAttempt(subject, prefix=("env", f"RAY_GCS_SERVER_PORT={port}"))
        faults = ends(attempt, 1, rf"RAY_GCS_SERVER_PORT is {port}, where somebody listens; unset it, or")
    return faults or resumes(subject, undisturbed)


def stranger_at_the_address(subject: Subject, undisturbed: Path) -> list[str]:
    """With the launcher `ray`, a silent program listens at the address of the cluster to join."""
    if subject.launcher != "ray":
        return skipped("there is no address")
    with listening(0) as (port,):
        faults = ends(
            RunAttempt(subject, 0, f"cluster.address=127.0.0.1:{port}", "cluster.deadlines.start=10"), 1,
            rf"rank 0 failed in start: .* 9 s to connect to Ray at 127\.0\.0\.1:{port}; somebody listens there: is it",
        )  # fmt: skip
    return faults or resumes(subject, undisturbed)


def no_port_is_left(subject: Subject, undisturbed: Path) -> list[str]:
    """The system has no port left to give to who wants to listen: Ray, or the ranks of a trainer that meet."""
    subject = attrs.evolve(subject, layout="two")
    narrow = "ip link set lo up && echo '40000 40003' > /proc/sys/net/ipv4/ip_local_port_range"
    trial = ["unshare", "--net", "sh", "-c", narrow]
    if os.geteuid() or subprocess.run(trial, capture_output=True, check=False).returncode:
        return skipped("a network of few ports needs unshare and ip, and the right to use them")
    hold = f"coproc {{ exec \"$0\" -c '{HOLD_PORTS}'; }}; read -u ${{COPROC[0]}} _ || exit 99"
    hold = f'{narrow}; {hold}; "$@"; code=$?; kill $COPROC_PID; exit $code'
    attempt = RunAttempt(subject, prefix=("unshare", "--net", "bash", "-c", hold, sys.executable))
    error = r"backend rank \d failed in start: .*the system has no port left of those that it gives \(40000-40003\)"
    return ends(attempt, 1, error) or ends(RunAttempt(subject, 99), 0) or ended_faults(subject, None)


def node_leaves(subject: Subject, undisturbed: Path) -> list[str]:
    """With the launcher `ray`, the node of the generator is killed; the run goes on where there is room."""
    if subject.launcher != "ray":
        return skipped("there are no nodes")
    from ray.cluster_utils import Cluster

    subject = attrs.evolve(subject, layout="apart")
    small = {"object_store_memory": 80 << 20}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **small})
    try:
        able = [nodes.add_node(num_cpus=2, resources={"gen": 8}, **small) for _ in range(2)]
        where = (f"cluster.address={nodes.address}", "cluster.resources={generator: {gen: 1}}")
        attempt = RunAttempt(subject, 0, *where)
        wait_for(attempt, "backend.train", 3)
        attempt.process.send_signal(signal.SIGSTOP)  # else it may be over before the node is gone
        with looked() as found:
            (struck,) = (victim.pid for victim in found if victim.name == "generator-0")
        for node in able:
            if node.all_processes["raylet"][0].process.pid == _raylet(struck):
                nodes.remove_node(node, allow_graceful=False)
                break
        deadline = time.monotonic() + DEADLINE
        while Path(f"/proc/{struck}/root").exists() and time.monotonic() < deadline:  # not of a process that has ended
            time.sleep(0.05)
        attempt.process.send_signal(signal.SIGCONT)
        faults = ends(attempt, 0) or ended_faults(subject, None)
        if not re.search(r"generator rank 0 was lost in \w+: .*node \S+ \(\w+\) was lost", attempt.said()):
            faults.append(f"said {attempt.said()[-500:]!r}, wanted which node was lost")
        return faults
    finally:
        nodes.shutdown()


def ray_loses_its_head(subject: Subject, undisturbed: Path) -> list[str]:
    """With the launcher `ray`, the process that keeps Ray's records is killed; the run starts a Ray of its own."""
    if subject.launcher != "ray":
        return skipped("it is not used")
    attempt = RunAttempt(subject)
    wait_for(attempt, "after.step")
    with looked() as found:
        struck = [victim for victim in found if victim.name == "gcs_server" and victim.strike(signal.SIGKILL)]
    faults = ends(attempt, 0) or ended_faults(subject, undisturbed)
    if not re.search(r"rank 0 was lost in \w+: Ray's gcs_server .* SIGKILL.*; the run goes on", attempt.said()):
        faults.append(f"said {attempt.said()[-500:]!r}, wanted who was lost")
    return faults + ([] if struck else ["there was no gcs_server"])


def full_shared_memory(subject: Subject, undisturbed: Path) -> list[str]:
    """/dev/shm is full."""
    fill = "mount -t tmpfs -o size=16k t /dev/shm; head -c 100k /dev/zero > /dev/shm/full; "
    return _mounted(subject, fill, 0, "") or ended_faults(subject, undisturbed)


def full_temporary_folder(subject: Subject, undisturbed: Path) -> list[str]:
    """The folder for temporary files is full."""
    fill = f"mount -t tmpfs -o size=16k t {subject.temporary}; head -c 100k /dev/zero > {subject.temporary}/full; "
    error = r"(cannot|could not) .*(No space left|the disk is full)|No usable temporary directory"
    return _mounted(subject, fill, (0, 1), error) or resumes(subject, undisturbed)


def full_run_disk(subject: Subject, undisturbed: Path) -> list[str]:
    """The run folder's disk fills up in the middle of a checkpoint; with room made, the run goes on."""
    subject.run.mkdir(parents=True)
    fill = f"mount -t tmpfs -o size=4m t {subject.run}; "
    keep = f"cp -a {subject.run} {subject.folder}/kept; "
    faults = _mounted(subject, fill, 1, r"cannot write .*: the disk is full; free some space", keep)
    if faults:
        return faults
    subject.run.rmdir()
    (subject.folder / "kept").rename(subject.run)
    return resumes(subject, undisturbed)


def small_files_alone(subject: Subject, undisturbed: Path) -> list[str]:
    """No file may grow beyond a few blocks, as a quota would have it."""
    attempt = RunAttempt(subject, 0, prefix=("bash", "-c", 'ulimit -f 100; exec "$0" "$@"'))
    return ends(attempt, 1, r"cannot write .*: .*(too large|full)|cannot grow to .*too large") + resumes(
        subject, undisturbed
    )


def few_descriptors(subject: Subject, undisturbed: Path) -> list[str]:
    """The process may open only a few files."""
    attempt = RunAttempt(subject, 0, prefix=("bash", "-c", 'ulimit -n 16; exec "$0" "$@"'))
    return ends(attempt, (0, 1), "Too many open files") + resumes(subject, undisturbed)


KNOWN_PORTS = (6379, 6380, 8076, 8077, 8265, 8266, 8076, 10001, 52365, 44217, 44227, 29400, 29500)
"""Of Ray's head, its object managers, dashboard, client, agents and metrics, and of torch's rendezvous."""
HOLD_PORTS = """
import socket, time
held = [socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True) for port in range(40000, 40004)]
print("held", flush=True)
time.sleep(1000)
"""
SCENARIOS: Mapping[str, Callable[[Subject, Path], list[str]]] = {
    function.__name__: function
    for function in (
        two_drivers, terminated_with_all, terminated_while_saving, interrupted_twice, interrupted_with_reader, hung_up,
        hung_up_under_nohup, nobody_reads, no_terminal, killed_in_shutdown, killed_in_export, stopped_watchdog,
        killed_watchdog_and_driver, worker_hangs_while_starting, worker_hangs, taken_ports, chosen_port_is_taken,
        stranger_at_the_address, no_port_is_left, node_leaves, ray_loses_its_head, full_shared_memory,
        full_temporary_folder, full_run_disk, small_files_alone, few_descriptors,
    )
}  # fmt: skip


def wait_for(attempt: RunAttempt, phase: str, count: int = 1) -> None:
    """Wait until a phase has begun so often, or the run attempt is over."""
    while attempt.process.poll() is None and attempt.moments.read_text().count(f" begin {phase}\n") < count:
        time.sleep(0.001)


def ends(
    attempt: RunAttempt, codes: int | tuple[int, ...], said: str = "", seconds: float = 120.0 * SLOWNESS
) -> list[str]:
    """Wait for the end of a run attempt; check exit code and, of a failure, the words."""
    codes = (codes,) if isinstance(codes, int) else codes
    code = attempt.wait(seconds + PATIENCE)
    output = attempt.said()
    if code is None:
        attempt.process.kill()
        return [f"still running after {seconds + PATIENCE:.0f} s; it said {output[-500:]!r}"]
    faults = [] if code in codes else [f"ended with {code}, wanted {codes}; it said {output[-500:]!r}"]
    if code and said and not re.search(said, output):
        faults.append(f"said {output[-500:]!r}, wanted {said!r}")
    if noise := NOISE.search(output):
        faults.append(f"noise on the terminal: {noise[0]}: {output[-500:]!r}")
    return faults


def resumes(subject: Subject, undisturbed: Path) -> list[str]:
    """Check that the same command ends the run, with nothing lost."""
    return ends(RunAttempt(subject, 99), 0) or ended_faults(subject, undisturbed)


def skipped(why: str) -> list[str]:
    """Return that there is nothing to be found here."""
    print(f"     (left out: {why})")
    return []


@contextmanager
def listening(*ports: int) -> Iterator[list[int]]:
    """Listen on ports at all addresses, and never answer; on one that is taken somebody else does. 0: any."""
    with ExitStack() as stack:
        held = []
        for port in ports:
            with suppress(OSError):
                held.append(stack.enter_context(socket.create_server(("", port))))
        yield [listener.getsockname()[1] for listener in held]


def _raylet(pid: int) -> int:
    """Return the process id of the raylet of a worker's node."""
    variables = dict(line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in line)
    return int(variables["RAY_RAYLET_PID"])


def _all() -> list[Victim]:
    with looked() as found:
        return found


@contextmanager
def looked() -> Iterator[list[Victim]]:
    """Return the processes of runs that are there."""
    found = list(victims())
    try:
        yield found
    finally:
        for victim in found:
            victim.close()


def _mounted(subject: Subject, before: str, codes: int | tuple[int, ...], said: str, after: str = "") -> list[str]:
    """Run a run attempt with a small disk somewhere; nothing to be found where this machine does not let us mount."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        return skipped("mounting a small disk needs unshare, and the right to use it")
    subject.write()
    script = f'{before} "$0" "$@"; code=$?; {after} exit $code'
    return ends(RunAttempt(subject, 0, prefix=("unshare", "-m", "bash", "-c", script)), codes, said)
