"""Nothing gets out of a sandbox: every escape of `escapes.py` is tried as root and as an ordinary user."""

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import whet_sandbox
from whet_testing.processes import survivors

HERE = Path(__file__).parent
SECRET = "the driver's secret"
NOBODY = 65_534
SYSTEM_PYTHON = "/usr/bin/python3"

sys.path.insert(0, str(HERE))
from trying import escapes  # noqa: E402 - a module beside this file

sys.path.remove(str(HERE))
ESCAPES = escapes().ESCAPES
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the escapes make system calls of x86-64")


def installed() -> list[str]:
    """Return the folders from which this process imports, without those of Python's own library."""
    return [path for path in sys.path if os.path.isdir(path) and not path.startswith(sys.base_prefix)]


def by_an_ordinary_user() -> dict[str, object]:
    """Return settings of a process of another user, who can start neither this Python nor look into its folders."""
    if os.geteuid() != 0:
        return {"executable": sys.executable}
    if not os.path.exists(SYSTEM_PYTHON):
        pytest.skip(f"an ordinary user of this machine has no {SYSTEM_PYTHON}")
    version = subprocess.run(
        [SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True
    )
    if version.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip(f"{SYSTEM_PYTHON} is another version, which cannot import what is installed here")
    reach = subprocess.run(["ls", *installed(), str(HERE)], user=NOBODY, group=NOBODY, capture_output=True)
    if reach.returncode:
        pytest.skip("an ordinary user cannot read what is installed here")
    return {"executable": SYSTEM_PYTHON, "user": NOBODY, "group": NOBODY, "extra_groups": []}


@pytest.fixture(scope="module", params=["root", "an ordinary user"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str]]:
    """Return how each escape ended, and all that it wrote."""
    settings: dict[str, object] = {"executable": sys.executable}
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("the tests do not run as root")
    if request.param != "root":
        settings = by_an_ordinary_user()
    python = str(settings.pop("executable"))
    folder = tmp_path_factory.mktemp("secrets")
    secret, unix = folder / "secret", folder / "socket"
    secret.write_text(SECRET)
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    with contextlib.ExitStack() as stack:
        inet = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        named, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        named.bind(str(unix))
        unix.chmod(0o777)
        abstract.bind(f"\0whet-{os.getpid()}")
        for one in (named, abstract):
            one.listen()
        before = survivors(frozenset())
        command = [python, str(HERE / "trying.py"), str(secret), str(inet.getsockname()[1]), str(unix)]
        command += [f"whet-{os.getpid()}", str(Path(whet_sandbox.__file__).parent)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, cwd="/",
            env={"PYTHONPATH": os.pathsep.join(installed()), "HF_TOKEN": SECRET, "PATH": "/usr/bin:/bin"},
            **settings,  # type: ignore[call-overload]
        )  # fmt: skip
        left = survivors(before, patience_seconds=5.0)
    assert done.returncode == 0, done.stderr
    assert not left, f"an escape left processes behind: {left}"
    return [(f"{why} {code}", stdout, stderr) for why, code, stdout, stderr in json.loads(done.stdout)]


@pytest.mark.parametrize("at", range(len(ESCAPES)), ids=[escape.name.replace(" ", "-") for escape in ESCAPES])
def test_an_escape_is_stopped_by_its_wall(results: list[tuple[str, str, str]], at: int) -> None:
    ended, stdout, stderr = results[at]
    assert "ESCAPED" not in stdout
    assert SECRET not in stdout + stderr
    shown = f"{ended}\n{stdout}\n{stderr}"
    assert re.search(ESCAPES[at].shows, shown, re.MULTILINE), f"not stopped by {ESCAPES[at].wall}: {shown}"


def test_every_escape_has_a_name_of_its_own() -> None:
    assert len({escape.name for escape in ESCAPES}) == len(ESCAPES) >= 90
