"""Commands of distributions beside core's own."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import whet.plugins.catalog

SHINE = """
import click
from whet.cli.command import Command
from whet.errors import WhetError

@click.command(cls=Command)
@click.argument("word")
def shine(word):
    if word == "dull":
        raise WhetError("it is dull")
    click.echo(f"it shines: {word}")
"""


@pytest.fixture
def in_catalog(site: Path) -> None:
    """Commands in the catalog of a process that `command` starts: `shine`, of `whet-shine`."""
    found = json.loads(whet.plugins.catalog.FILE.read_text(encoding="utf-8"))
    (site / "catalog.json").write_text(json.dumps({**found, "commands": {"shine": "whet-shine"}}))


def test_a_command_of_a_distribution_is_a_command_of_whet(command: Any, install_command: Any) -> None:
    install_command("whet-shine", "shine", SHINE)
    done = command("shine", "brightly")
    assert (done.returncode, done.stdout) == (0, "it shines: brightly\n"), done.stderr
    assert command("shine", "--help").stdout.splitlines()[0].endswith(" shine [OPTIONS] WORD")


def test_a_command_of_a_distribution_reports_errors_as_those_of_core_do(command: Any, install_command: Any) -> None:
    install_command("whet-shine", "shine", SHINE)
    done = command("shine", "dull")
    assert (done.returncode, done.stderr) == (1, "Error: it is dull\n")
    assert "Traceback" in command("shine", "dull", "--traceback").stderr


def test_a_distribution_without_a_summary_is_named_in_the_list_of_commands(command: Any, install_command: Any) -> None:
    install_command("whet-shine", "shine", SHINE)
    assert "  shine  Offered by whet-shine.\n" in command("--help").stdout


def test_the_list_of_commands_shows_the_first_sentence_of_a_docstring_without_an_import(
    command: Any, install_command: Any
) -> None:
    described = 'def shine(word):\n    """Make WORD shine. It takes a while."""\n'
    source = f"{SHINE.replace('def shine(word):', described.rstrip())}\nraise SystemExit('it is imported')\n"
    install_command("whet-shine", "shine", source, summary="Polish.")
    assert "  shine  Make WORD shine.\n" in command("--help").stdout


def test_a_command_of_two_distributions_is_refused_with_both_names(command: Any, install_command: Any) -> None:
    install_command("whet-shine", "shine", SHINE)
    install_command("whet-again", "shine", SHINE)
    done = command("shine", "brightly")
    words = "the command 'shine' is offered by whet-again and whet-shine; uninstall all but one of them"
    assert (done.returncode, done.stderr) == (1, f"Error: {words}\n")
    assert words in " ".join(command("--help").stdout.split())
    assert command("check", "--help").returncode == 0, "other commands do not mind"


def test_a_command_of_core_and_a_distribution_is_refused_with_both_names(command: Any, install_command: Any) -> None:
    install_command("whet-shine", "check", SHINE.replace("shine", "check"))
    done = command("check", "it.yaml")
    words = "the command 'check' is offered by whet and whet-shine; uninstall whet-shine"
    assert (done.returncode, done.stderr) == (1, f"Error: {words}\n")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name' ("),
        ("raise SystemExit(3)", "SystemExit: 3 ("),
        ("other = 1", "AttributeError: module 'whet_shine_cli' has no attribute 'shine'"),
        ("shine = 7", "whet_shine_cli:shine is 7, wanted a click command\n"),
    ],
)
def test_a_command_that_cannot_be_imported_says_why(
    command: Any, install_command: Any, source: str, reason: str
) -> None:
    install_command("whet-shine", "shine", source)
    done = command("shine", "brightly")
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: the command 'shine' of whet-shine cannot be used: {reason}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_command_for_another_whet_is_refused(command: Any, install_command: Any) -> None:
    install_command("whet-shine", "shine", SHINE, requires="whet>=99")
    said = command("shine", "brightly").stderr
    assert "Error: the command 'shine' of whet-shine cannot be used: it is made for whet>=99, and" in said


def test_metadata_that_cannot_be_read_end_no_command(command: Any, install: Any) -> None:
    (install("whet-shine", {}) / "entry_points.txt").write_bytes(b"[whet.commands]\nshine = \xff:shine\n")
    (install("whet-other", {}) / "entry_points.txt").write_text("[whet.commands]\nno sense\n")
    assert command("--help").returncode == 0


def test_a_command_that_is_not_installed_leads_to_its_distribution(command: Any, in_catalog: None) -> None:
    done = command("shine", "brightly")
    words = "Error: there is no command 'shine' here; it is offered by whet-shine: pip install whet-shine\n"
    assert done.returncode == 2
    assert done.stderr.endswith(words), done.stderr
    assert "(did you mean 'shine'? it is offered by whet-shine: pip install whet-shine)\n" in command("shin").stderr


def test_a_command_that_is_almost_right_is_named(command: Any, install_command: Any, in_catalog: None) -> None:
    install_command("whet-shine", "shine", SHINE)
    for word, meant in (("chekc", "check"), ("shiny", "shine")):
        said = command(word).stderr
        assert said.endswith(f"Error: there is no command {word!r} (did you mean {meant!r}?)\n"), said


def test_the_end_of_a_run_names_a_command_only_where_it_is_installed_and_meant_for_runs(
    site: Path, install_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.cli import commands
    from whet.cli.run import nothing_left
    from whet.run.compose import Outcome

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        here = importlib.metadata.distributions(path=[str(site)])
        return [entry for one in here for entry in one.entry_points if entry.group == group]

    monkeypatch.setattr(commands, "entry_points", entry_points)
    outcome = Outcome(site, 3, finished=True, before=True)
    assert f"\nresults: {site}\n" in nothing_left("it.yaml", (), outcome)
    install_command("whet-shine", "shine", SHINE, summary="Make it shine.")
    assert f"\nresults: {site}\n" in nothing_left("it.yaml", (), outcome)
    (file,) = site.glob("whet_shine*/entry_points.txt")
    file.write_text(f"{file.read_text()}\n[whet.after_run]\nshine = whet_shine_cli:shine\n")
    assert f"\nresults: `whet shine {site}`: make it shine\n" in nothing_left("it.yaml", (), outcome)
    apart = f"`whet shine '{site}/a run'`: make it shine"
    assert f"\nresults: {apart}\n" in nothing_left("it.yaml", (), evolve(outcome, folder=site / "a run"))
    (site / "model").mkdir()
    wanted = f"\nresults: the model is in {site}/model, and `whet shine {site}`: make it shine\n"
    assert wanted in nothing_left("it.yaml", (), outcome)


@pytest.mark.parametrize(
    ("stopped_by", "words"), [(15, "ended after step 2;"), (None, "the algorithm returned after step 2 of 9;")]
)
def test_an_algorithm_that_returns_early_is_told_from_a_run_that_was_ended(
    stopped_by: int | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import whet.plugins.registry
    import whet.run.compose
    from whet.cli.run import run
    from whet.run.compose import Outcome

    outcome = Outcome(Path("folder"), 2, finished=False, stopped_by=stopped_by, total=9)
    monkeypatch.setattr(whet.plugins.registry, "load_plugins", whet.plugins.registry.Registry)
    monkeypatch.setattr(whet.run.compose, "run", lambda *args, **options: outcome)
    assert run.callback is not None
    assert run.callback("it.yaml", ()) == (143 if stopped_by else 1)
    assert words in "".join(capsys.readouterr())
