"""`whet` in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from whet.cli.app import group


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `whet` with arguments in the folder of the config."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(group, arguments)
