"""The command, as `whet` runs it."""

import ast
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from whet.cli.app import group

SOURCE = Path(__file__).parents[1] / "src" / "whet_report"


def test_the_page_is_written_into_the_run_folder_or_where_it_is_wanted(run_folders, tmp_path):
    run = run_folders.write(tmp_path / "run")
    for options, file in (([], run / "report.html"), (["--out", str(tmp_path / "page.html")], tmp_path / "page.html")):
        done = CliRunner().invoke(group, ["report", str(run), *options])
        assert done.exit_code == 0, done.output
        assert done.output.startswith(f"wrote {file} (")
        assert file.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_link_stays_a_link_and_what_is_no_file_is_refused(run_folders, tmp_path):
    run = run_folders.write(tmp_path / "run")
    (tmp_path / "link.html").symlink_to("target.html")
    assert CliRunner().invoke(group, ["report", str(run), "--out", str(tmp_path / "link.html")]).exit_code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "target.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    os.mkfifo(tmp_path / "pipe")
    done = CliRunner().invoke(group, ["report", str(run), "--out", str(tmp_path / "pipe")])
    assert done.exit_code == 1
    assert "pipe is no regular file" in done.output
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_that_holds_no_run_is_refused_in_words(tmp_path, made):
    folder = tmp_path / "nothing"
    if made:
        folder.mkdir()
    done = CliRunner().invoke(group, ["report", str(folder)])
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert str(folder) in done.output
    assert len(done.output.splitlines()) == 1


def test_of_core_it_imports_what_reads_files_and_what_reports_errors_alone():
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                found.add(node.module)
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    ours = {name for name in found if name.partition(".")[0] == "whet"}
    assert ours == {"whet.data.files", "whet.errors", "whet.cli.command"}
