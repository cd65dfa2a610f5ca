"""An environment on top of the one that runs the tests, in which commands of the documentation may install things."""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

Shell = Callable[[str, Path], str]


@pytest.fixture(scope="session")
def layered_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a virtual environment that also sees everything installed here; give its folder of commands."""
    folder = tmp_path_factory.mktemp("layer") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    here = next(p for p in sys.path if p.endswith("site-packages"))
    site = next(folder.glob("lib/python*/site-packages"))
    # `addsitedir` rather than a plain path, so that editable installs below are seen too.
    (site / "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    run_whet = "-c 'from whet.cli import main; main()'"
    for command, how in (("pip", "-m pip"), ("pytest", "-m pytest"), ("whet", run_whet)):
        script = folder / "bin" / command
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" {how} "$@"\n')
        script.chmod(0o755)
    return folder / "bin"


@pytest.fixture
def shell(layered_python: Path) -> Shell:
    """Give a function that runs bash text in a folder and gives its output; it fails the test where a command fails."""
    environment = {
        **os.environ,
        "PATH": f"{layered_python}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(layered_python.parent),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's own way to say yes
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }

    def run(text: str, folder: Path) -> str:
        command = ["bash", "-e", "-o", "pipefail", "-c", text]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run
