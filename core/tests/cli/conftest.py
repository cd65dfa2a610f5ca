"""The command line as people run it: in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whet_testing.forking import Programs


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Start what forks the commands. It has imported what every command imports."""
    with Programs(["whet.cli.app", "whet.plan.prepare", "whet.plugins.registry"]) as started:
        yield started


@pytest.fixture
def command(site: Path, tmp_path: Path, programs: Programs) -> Any:
    """Run `whet` with arguments in a temporary folder, with the plugins and the catalog of `site` alone.

    Python runs `code` where it is given, from its start.
    """
    environment = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1"}
    alone = (
        "import importlib.metadata, pathlib, whet.cli.commands, whet.plugins.catalog, whet.plugins.registry;"
        "from whet.installed import entry_points;"
        "from whet.cli import main;"
        f"own = pathlib.Path({str(site / 'catalog.json')!r});"
        "whet.plugins.catalog.FILE = own if own.exists() else whet.plugins.catalog.FILE;"
        f"whet.plugins.registry.distributions = lambda: importlib.metadata.distributions(path=[{str(site)!r}]);"
        f"here = lambda entry: entry.dist.locate_file('') == pathlib.Path({str(site)!r});"
        "whet.cli.commands.entry_points = lambda group: filter(here, entry_points(group)); main()"
    )

    def run(*arguments: str, code: str = "") -> "subprocess.CompletedProcess[str]":
        if not code:
            return programs.run(alone, arguments, folder=tmp_path, variables=environment, seconds=60)
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def install_command(site: Path, install: Any) -> Any:
    """Install a distribution with one command, whose source must make a click command of the command's name."""

    def install_one(distribution: str, name: str, source: str, *, summary: str = "", requires: str = "") -> None:
        info, module = install(distribution, {}, requires=requires), f"{distribution.replace('-', '_')}_cli"
        if summary:
            (info / "METADATA").write_text((info / "METADATA").read_text() + f"Summary: {summary}\n")
        (info / "entry_points.txt").write_text(f"[whet.commands]\n{name} = {module}:{name}\n")
        (site / f"{module}.py").write_text(source)

    return install_one
