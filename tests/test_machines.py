"""Machines of their own, played by network namespaces: no loopback, no Unix sockets and no /dev/shm in common.

Files and processes are seen by all. It takes root and `ip` to make them; elsewhere these tests are skipped.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from attrs import evolve, frozen

from whet_testing.contracts.workers import alive
from whet_testing.runs import numbers

SMALL = ["--object-store-memory=83886080", "--num-cpus=4"]


@frozen
class Machine:
    """A network namespace with one address, on a wire between two."""

    name: str
    address: str
    environment: dict[str, str]

    def command(self, *words: object) -> list[str]:
        """Return the command that runs another there."""
        alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.name, *alone, *map(str, words)]

    def run(self, *words: object, seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end."""
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=seconds, check=False, env=self.environment
        )

    def start_ray(self, *words: str) -> None:
        """Start a node of a Ray cluster there."""
        ray = sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={self.address}"
        done = self.run(*ray, *SMALL, *words)
        assert done.returncode == 0, done.stdout + done.stderr

    def unplug(self) -> None:
        """Cut the wire: what was sent and not received is lost, and nobody is told."""
        subprocess.run(["ip", "-n", self.name, "link", "set", "wire", "down"], check=True)

    def remove(self) -> None:
        """End everything that runs there, and take it away."""
        told = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False).stdout
        for pid in map(int, told.split()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", self.name], check=False)


@contextmanager
def wired() -> Iterator[list[Machine]]:
    """Make two machines, with a Ray cluster of both: its head has the resource `train`, the other `gen`."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces are made by root, with `ip`")
    run = f"whet{secrets.token_hex(3)}"
    hasty = {"initial_delay_ms": 0, "period_ms": 1000, "timeout_ms": 1000, "failure_threshold": 3}
    environment = {
        **os.environ,
        **{f"RAY_health_check_{name}": str(value) for name, value in hasty.items()},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    made = [Machine(f"{run}-{n}", f"10.214.77.{n}", environment) for n in (1, 2)]
    folder = Path("/tmp", run)  # Ray's sockets bear no long path
    try:
        for machine in made:
            if subprocess.run(["ip", "netns", "add", machine.name], capture_output=True, check=False).returncode:
                pytest.skip("this system makes no network namespaces")
        head, other = made
        wire = f"link add wire netns {head.name} type veth peer name wire netns {other.name}"
        subprocess.run(["ip", *wire.split()], check=True)
        for machine in made:
            for words in ("link set lo up", "link set wire up", f"addr add {machine.address}/24 dev wire"):
                subprocess.run(["ip", "-n", machine.name, *words.split()], check=True)
        own = "--include-dashboard=false", f"--temp-dir={folder}"
        head.start_ray("--head", "--port=6379", '--resources={"train": 8}', *own)
        other.start_ray(f"--address={head.address}:6379", '--resources={"gen": 8}')
        yield made
    finally:
        for machine in made:
            machine.remove()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    """Two machines that work."""
    pytest.importorskip("ray")
    with wired() as made:
        yield made


@pytest.fixture
def recipe(small_run):
    """Write one of GRPO: on one machine, or with the trainer on the first and the generator on the second."""

    def write(folder: Path, steps: int, machines: Sequence[Machine] = (), **cluster: object) -> Path:
        folder.mkdir()
        said = {"threads": {"backend": 1, "generator": 1}, "colocate": [], **cluster}
        if machines:
            resources = {"backend": {"train": 1}, "generator": {"gen": 1}}
            said |= {"launcher": "ray", "address": f"{machines[0].address}:6379", "resources": resources}
        return small_run(folder, run={"folder": str(folder / "run"), "steps": steps, "seed": 1}, cluster=said)

    return write


def test_a_trainer_on_one_machine_and_a_generator_on_another_give_the_bits_of_one(tmp_path, recipe, whet, machines):
    here, there = recipe(tmp_path / "here", 5), recipe(tmp_path / "there", 5, machines)
    done = whet("run", here)
    assert done.code == 0, done.errors
    remote = machines[0].run(sys.executable, "-m", "whet", "run", there)
    assert remote.returncode == 0, remote.stderr
    assert numbers(there.parent / "run") == numbers(here.parent / "run")
    assert json.loads((there.parent / "run/plan.json").read_text())["way"]["transport"] == "shared-memory"
    model = "run/model/model.safetensors"
    assert (there.parent / model).read_bytes() == (here.parent / model).read_bytes()


def test_a_cluster_that_wants_a_token_says_so(tmp_path, recipe, machines):
    open_ = {name: value for name, value in machines[0].environment.items() if not name.startswith("RAY_AUTH")}
    there = recipe(tmp_path / "there", 1, machines)
    done = evolve(machines[0], environment=open_).run(sys.executable, "-m", "whet", "run", there)
    assert done.returncode == 1
    address = f"{machines[0].address}:6379"
    assert f"cluster.address: Ray at {address} wants a token that this process does not show" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_lost_machine_is_noticed_and_where_none_can_take_its_place_that_is_said(tmp_path, recipe):
    pytest.importorskip("ray")
    with wired() as machines:
        there = recipe(tmp_path / "there", 100_000, machines, deadlines={"start": 60, "heartbeat": 15})
        metrics = there.parent / "run/metrics.jsonl"
        command = machines[0].command(sys.executable, "-m", "whet", "run", there)
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen(command, env=machines[0].environment, stdout=said, stderr=said)
        try:
            while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
                time.sleep(0.05)
            machines[1].unplug()
            assert process.wait(120.0) == 1
        finally:
            process.kill()
            process.wait()
    lines = (tmp_path / "said").read_text().splitlines()
    assert any("generator rank 0 was lost in" in line and "it is restarted by itself" in line for line in lines), lines
    (error,) = [line for line in lines if line.startswith("Error: ")]  # Ray may have its own words after it
    assert error.startswith("Error: generator rank 0 failed in start:"), lines
    assert "CPU 4, train 8: no node can hold that" in error


CUT_OFF = """
import os, sys, time
from pathlib import Path
from whet_ray.cluster import RayCluster
from whet.errors import WorkerLost
from whet_testing.scripted_worker import TARGET

with RayCluster(Path(sys.argv[1]), address=sys.argv[2], resources={"a": {"gen": 1}, "b": {"gen": 1}}) as cluster:
    idle, asked = (cluster.worker_group(role, threads=1).spawn(TARGET, {}) for role in "ab")
    waiting = [idle.start("hang", phase="generate")]
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    waiting.append(asked.start("hang", phase="generate"))
    for one in waiting:
        try:
            one.result()
        except WorkerLost as error:
            print("LOST", time.monotonic() - begin, error, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_machine_that_falls_silent_is_noticed_long_before_its_heartbeat_is_missed(tmp_path):
    """`docs/how-to/ray.md` says: after a minute. One call was sent to it before the silence, and one after."""
    pytest.importorskip("ray")
    with wired() as (head, other):
        command = head.command(sys.executable, "-c", CUT_OFF, tmp_path, f"{head.address}:6379")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(command, env=head.environment, **pipes) as driver:
            while "ready" not in (line := driver.stdout.readline()):
                assert line, "it ended"
            other.unplug()
            driver.stdin.write("\n")
            driver.stdin.flush()
            lost = [line.split(maxsplit=2) for line in driver.stdout if line.startswith("LOST")]
    assert len(lost) == 2
    for _, seconds, error in lost:
        assert float(seconds) < 110, "the heartbeat alone would take 120 s"
        assert other.address in error
