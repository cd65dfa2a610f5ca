"""The reference pages are what the code says, and every hook is among them with its exact signature."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from whet.plugins import hookspecs
from whet_start.explain import FieldDoc

ROOT = Path(__file__).resolve().parents[2]
HOOKS = [name for name in vars(hookspecs) if name.startswith("whet_")]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_pages_are_up_to_date(generator):
    outdated = list(generator.differences(ROOT / "docs" / "reference"))
    assert not outdated, f"run `python docs/generate_reference.py`: {outdated}"


def test_a_table_of_keys_has_its_bars_escaped(generator):
    table = generator.markdown([FieldDoc("either", "an integer or null", "null", "One | the other.")])
    assert table.startswith("| key | type | default | meaning |\n| --- | --- | --- | --- |\n")
    assert "| `either` | an integer or null | `null` | One \\| the other. |" in table


def test_there_are_hooks():
    assert len(HOOKS) >= 11


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_documented_with_its_exact_signature(name):
    page = (ROOT / "docs" / "reference" / "hooks.md").read_text()
    section = page.split(f"## `{name}`\n")[1].split("\n## ")[0]
    documented = ast.parse(section.split("```python not run: a signature\n")[1].split("\n```")[0] + ": ...").body[0]
    assert documented.name == name
    actual = ast.parse(inspect.getsource(getattr(hookspecs, name))).body[0]
    assert [_words(a.annotation) for a in documented.args.args] == [_words(a.annotation) for a in actual.args.args]
    assert [a.arg for a in documented.args.args] == [a.arg for a in actual.args.args]
    assert _words(documented.returns) == _words(actual.returns)
    assert inspect.getdoc(getattr(hookspecs, name)).splitlines()[0] in section


def test_every_hook_specification_has_a_docstring_that_names_its_arguments():
    for name in HOOKS:
        function = getattr(hookspecs, name)
        for argument in inspect.signature(function).parameters:
            assert f":param {argument}:" in function.__doc__, f"{name}: {argument} is not explained"


def _words(annotation):
    return annotation.value if isinstance(annotation, ast.Constant) and annotation.value else ast.unparse(annotation)


def test_the_script_writes_nothing_when_it_is_asked_for_help_or_to_check(generator, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    with pytest.raises(SystemExit):
        generator.main(["--help"])
    monkeypatch.setattr(generator, "pages", lambda: {"new.md": "# New\n"})
    assert generator.main(["--check"]) == 1
    assert "docs/reference/new.md is out of date" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
