"""The commands end as those of core do."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import whet_jobs.jobs
from whet.cli.app import group
from whet.errors import WhetError
from whet_jobs.evaluate import evaluate
from whet_jobs.export import export
from whet_training.whole import whole


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


@pytest.mark.parametrize("held", ["evaluation.json", "config.yaml", "tasks/sums.jsonl"])
def test_an_evaluation_is_refused_a_folder_that_is_not_empty_before_anything_else(tmp_path: Path, held: str) -> None:
    out = tmp_path / "out"
    (out / held).parent.mkdir(parents=True)
    (out / held).write_text("of another")
    done = CliRunner().invoke(group, ["eval", str(tmp_path / "none.yaml"), "--out", str(out)])
    assert done.exit_code == 1
    assert f"{out} is no empty folder: it holds {held.split('/')[0]}; wanted a new or an empty one" in done.stderr
    assert (out / held).read_text() == "of another"


@pytest.mark.parametrize("there", [True, False])
def test_an_evaluation_takes_a_new_or_an_empty_folder(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()
    done = CliRunner().invoke(group, ["eval", str(tmp_path / "none.yaml"), "--out", str(out)])
    assert "there is no file" in done.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(group, ["eval", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "file" / "out")])
    assert done.exit_code == 1
    assert f"cannot write {tmp_path / 'file' / 'out'}: Not a directory" in done.stderr


def test_a_second_evaluation_is_refused_the_folder_of_the_first_before_anything_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with whole(out):
        done = CliRunner().invoke(group, ["eval", str(tmp_path / "none.yaml"), "--out", str(out)])
    assert done.exit_code == 1
    assert f"{out} is being written by another process" in done.stderr


def test_an_evaluation_that_cannot_be_written_is_shown_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """A result for which there is no room."""

        def __str__(self) -> str:
            return "the table"

        def write(self, out: Path) -> None:
            (out / "sums.jsonl").touch()
            raise WhetError("the disk is full")

    monkeypatch.setattr(whet_jobs.jobs, "evaluate", lambda *args, **named: Full())
    done = CliRunner().invoke(group, ["eval", "it.yaml", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "the disk is full" in done.stderr
    assert done.stdout == "the table\n"
    assert not list(tmp_path.iterdir())
