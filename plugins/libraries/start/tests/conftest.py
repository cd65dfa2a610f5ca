"""Ways to run a command: in this process, or in a process of its own."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from whet.cli.app import group
from whet_testing.forking import Programs


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `whet` with arguments in the folder of the config."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(group, arguments)


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Start what forks the processes of `alone`."""
    with Programs(["whet.cli.app", "whet.plan.load", "whet_start.plugins"]) as started:
        yield started


@pytest.fixture
def alone(site: Path, tmp_path: Path, programs: Programs) -> "Callable[..., subprocess.CompletedProcess[str]]":
    """Run `whet plugins` with arguments in a process of its own, which sees the distributions of `site` alone."""
    code = (
        "import importlib.metadata, pathlib, whet.cli.app, whet.cli.commands, whet.plugins.registry;"
        "import whet_start.plugins; from whet.installed import entry_points;"
        f"whet.plugins.registry.distributions = lambda: importlib.metadata.distributions(path=[{str(site)!r}]);"
        f"here = lambda entry: entry.dist.locate_file('') == pathlib.Path({str(site)!r});"
        "whet.cli.commands.entry_points = lambda group: filter(here, entry_points(group));"
        "whet.cli.app.group.add_command(whet_start.plugins.plugins); whet.cli.main()"
    )
    variables = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1"}
    return lambda *arguments: programs.run(
        code, ("plugins", *arguments), folder=tmp_path, variables=variables, seconds=60
    )
