"""`whet run` within a job of a Ray cluster, and beside one: it joins the cluster that Ray's own commands would."""

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from attrs import frozen

from whet_testing.contracts.workers import wait_until
from whet_testing.processes import adopting_orphans, descendants, end, survivors

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks_under_ray")]

RAY = sys.executable, "-m", "ray.scripts.scripts"
SERVES_JOBS = importlib.util.find_spec("aiohttp_cors") is not None
jobs = pytest.mark.skipif(not SERVES_JOBS, reason="Ray's job server is not installed: pip install 'ray[default]'")


@frozen
class Head:
    """The head of a Ray cluster on this machine, with a token."""

    address: str
    dashboard: str
    folder: Path
    environment: dict[str, str]
    """Of programs that may reach it."""

    def run(self, *words: object, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run a command that may reach it."""
        return subprocess.run(
            [*map(str, words)], capture_output=True, text=True, timeout=300, check=False,
            env={**self.environment, **variables},
        )  # fmt: skip

    def listed(self, what: str) -> list[dict[str, object]]:
        """Return what `ray list` shows."""
        done = self.run(*RAY, "list", what, "--format", "json", "--limit", "1000", "--address", self.dashboard)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout[done.stdout.index("[") :])
        assert isinstance(found, list)
        return found


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """Start one as `ray start --head` does, in a folder where nobody else's Ray is found."""
    folder = Path("/tmp", f"w{secrets.token_hex(3)}")
    port, dashboard = free_port(), free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
    }  # fmt: skip
    serves = f"--include-dashboard={str(SERVES_JOBS).lower()}", f"--dashboard-port={dashboard}"
    small = "--num-cpus=4", "--object-store-memory=83886080", f"--dashboard-agent-listen-port={free_port()}"
    start = [*RAY, "start", "--head", f"--port={port}", *small, *serves]
    with adopting_orphans():
        before = descendants()
        try:
            done = subprocess.run(start, capture_output=True, text=True, timeout=120, check=False, env=environment)
            assert done.returncode == 0, done.stdout + done.stderr
            address = (folder / "ray/ray_current_cluster").read_text().strip()
            assert address.endswith(f":{port}")
            yield Head(address, f"http://127.0.0.1:{dashboard}", folder, environment)
        finally:
            end(survivors(before))
            wait_until(lambda: not survivors(before), "Ray is gone")
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def recipe(tmp_path, small_run):
    """Write a small run on Ray that names no cluster."""
    cluster = {"launcher": "ray", "threads": {"backend": 1, "generator": 1}}
    return small_run(tmp_path, run={"folder": str(tmp_path / "named"), "steps": 1}, cluster=cluster)


def nodes_of(folder: Path) -> set[str]:
    """Return where the log of a worker says that Ray put it."""
    return {line for line in (folder / "address").read_text().splitlines() if line}


NOTES_ADDRESS = """
import ray
import whet


@whet.hookimpl
def whet_step_finished(step, metrics):
    with open({path!r}, "a") as file:
        file.write(ray.get_runtime_context().gcs_address + "\\n")
"""


@pytest.fixture
def noting(recipe, tmp_path):
    """Make the run record which cluster it is in."""
    (tmp_path / "noting.py").write_text(NOTES_ADDRESS.format(path=str(tmp_path / "address")))
    document = yaml.safe_load(recipe.read_text())
    document["plugins"].append(str(tmp_path / "noting.py"))
    recipe.write_text(yaml.safe_dump(document))
    return recipe


@pytest.mark.parametrize(
    ("variables", "override"),
    [
        ({"RAY_ADDRESS": "{address}"}, ""),
        ({"RAY_ADDRESS": "{address}"}, "auto"),
        ({}, "auto"),
        ({"RAY_ADDRESS": "127.0.0.1:1"}, "{address}"),
    ],
    ids=["variable", "variable-auto", "auto", "named"],
)
def test_a_run_joins_the_cluster_that_ray_itself_would(head, noting, tmp_path, variables, override):
    given = {name: value.format(address=head.address) for name, value in variables.items()}
    words = [f"cluster.address={override.format(address=head.address)}"] if override else []
    done = head.run(sys.executable, "-m", "whet", "run", noting, *words, **given)
    assert done.returncode == 0, done.stderr
    assert nodes_of(tmp_path) == {head.address}


def test_local_is_a_ray_of_its_own_whatever_the_environment_says(head, noting, tmp_path):
    words = "run", noting, "cluster.address=local"
    done = head.run(sys.executable, "-m", "whet", *words, RAY_ADDRESS=head.address)
    assert done.returncode == 0, done.stderr
    assert head.address not in nodes_of(tmp_path)


@jobs
def test_a_job_of_the_cluster_runs_in_it_under_names_that_can_be_read(head, noting, tmp_path):
    submit = *RAY, "job", "submit", "--address", head.dashboard, "--"
    done = head.run(*submit, sys.executable, "-m", "whet", "run", noting)
    assert done.returncode == 0, done.stdout + done.stderr
    assert nodes_of(tmp_path) == {head.address}
    assert (tmp_path / "named/model").is_dir()
    actors = {str(actor["name"]) for actor in head.listed("actors") if actor["class_name"] == "NodeAgent"}
    assert "whet:named:backend+generator-0" in actors
    groups = {str(group["name"]).partition("~")[0] for group in head.listed("placement-groups")}
    assert "whet:named:backend+generator" in groups
