"""The commands end as those of core do."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from whet.cli.app import group
from whet_jobs.evaluate import evaluate
from whet_jobs.export import export


@pytest.mark.parametrize(("name", "command"), [("eval", evaluate), ("export", export)])
def test_whet_finds_the_command_by_its_name(name: str, command: click.Command) -> None:
    assert group.get_command(click.Context(group), name) is command


@pytest.mark.parametrize("arguments", [["eval"], ["export", "x"], ["export", "x", "y", "--step", "last"]])
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    done = CliRunner().invoke(group, arguments)
    assert done.exit_code == 2
    assert "Usage: " in done.stderr


def test_what_is_not_there_is_a_message_that_ends_with_1(tmp_path: Path) -> None:
    for arguments, words in (
        (["eval", str(tmp_path / "none.yaml")], "there is no file"),
        (["export", str(tmp_path), str(tmp_path / "out")], "is no run folder: it holds no config.yaml"),
    ):
        done = CliRunner().invoke(group, arguments)
        assert done.exit_code == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
