"""What the pages tell people to type works. The words behind a fence's language say what is done with it.

```bash run            typed in a clone after the quickstart (see `sandbox`), line by line; on a page that installs
                       something a block is one script
```console run         the same for each `$ command`; the output shown must follow, `...` stands for anything
```python run          executed; later blocks of the page see the names of earlier ones
```yaml file=PATH      written to PATH (any language)
```yaml                a recipe, or a part of one that must load when laid over a small recipe
```json, ```toml       must parse
```text                a diagram, a formula or an output: nothing to do
```bash not run: WHY   shown only (any language)
"""

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import yaml
from attrs import frozen

from whet import __all__ as names_of_whet
from whet.cli.app import group
from whet.plan.load import load_config

FENCE = re.compile(r"^( *)```([\w{}-]+)(?: +([^\n]*))?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("docs/**/*.md", "*.md", "core/*.md", "plugins/*/*/README.md", "examples/**/*.md")
PAGES = sorted({page for pattern in PATTERNS for page in ROOT.glob(pattern) if "_build" not in page.parts})
SHELL_SYNTAX = re.compile(r"[|&;<>$`*]|^(?!whet )", re.MULTILINE)
SMALL = {
    "run": {"folder": "runs/small", "steps": 1},
    "model": {"path": "runs/quickstart-0/sft/model"},
    "algorithm": {"use": "grpo"},
    "backend": {"use": "fsdp2"},
}
"""What a part of a recipe is laid over."""


@frozen
class Block:
    """A fenced code block."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def where(self) -> str:
        """Page and line, as editors open them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, m.start()) + 1, m[2], m[3] or "", m[4]) for m in FENCE.finditer(text)]


def pages() -> list[object]:
    """Return every page with blocks; those that run something are slow."""
    found = {page: blocks(page) for page in PAGES}
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] if runs(inside) else [])
        for page, inside in found.items()
        if inside
    ]


def runs(inside: list[Block]) -> bool:
    return any(block.mark == "run" for block in inside)


@pytest.fixture
def sandbox(tiny_model_folder, tmp_path, monkeypatch) -> Path:
    """A clone after the quickstart: its recipes and examples, and a tiny model in the place of the warm start."""
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("quickstart-0/sft", "judge"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "model").symlink_to(tiny_model_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for a script that lies there
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.mark.parametrize("page", pages())
def test_a_page_does_what_it_says_from_top_to_bottom(page, request, sandbox, monkeypatch):
    inside = blocks(page)
    if any("whet env create" in block.text for block in inside if block.mark == "run"):
        request.getfixturevalue("offline_environments")
    apart = any("pip install" in block.text for block in inside if block.mark == "run")
    doer = Doer(request, sandbox, page, apart)
    monkeypatch.setitem(sys.modules, doer.module.__name__, doer.module)
    for block in inside:
        try:
            doer.do(block)
        except Exception as error:
            raise AssertionError(f"{block.where}: {type(error).__name__}: {error}") from error


class Doer:
    """Does what the blocks of one page say: in this process where that is the same; a new one takes seconds."""

    def __init__(self, request, folder: Path, page: Path, apart: bool) -> None:
        self._request, self._folder, self._apart = request, folder, apart
        self.module = types.ModuleType(f"page_{page.stem}".replace("-", "_"))

    def do(self, block: Block) -> None:
        if block.mark.startswith("not run: "):
            self._load_named_recipes(block)
        elif block.mark.startswith("file="):
            path = self._folder / block.mark.removeprefix("file=")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.mark == "run":
            {"bash": self._bash, "console": self._console, "python": self._python}[block.language](block)
        else:
            assert not block.mark, f"nobody knows how to do {block.language!r} {block.mark!r}"
            READERS[block.language](block.text)

    def _bash(self, block: Block) -> None:
        if self._apart:
            self._shell(block.text)
            return
        for command in joined(block.text).splitlines():
            if SHELL_SYNTAX.search(command):
                self._shell(command)
                continue
            code, output = whet(command)
            assert code == 0, f"{command}\n{output}"

    def _console(self, block: Block) -> None:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, wanted = part.partition("\n")
            if SHELL_SYNTAX.search(command):
                code, output = 0, self._shell(command)
            else:
                code, output = whet(command)
            assert code == 0 or wanted.strip(), f"{command}\n{output}"
            options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = not wanted.strip() or doctest.OutputChecker().check_output(wanted, output, options)
            assert same, f"{command}\nshows:\n{wanted}\nbut it is:\n{output}"

    def _python(self, block: Block) -> None:
        if self._apart:
            (self._folder / "block.py").write_text(block.text, encoding="utf-8")
            self._shell("python block.py")
            return
        # Lines are counted as on the page, so that tracebacks lead there.
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, vars(self.module))

    def _shell(self, text: str) -> str:
        shell: Callable[[str, Path], str] = self._request.getfixturevalue("shell")
        return shell(text, self._folder)

    def _load_named_recipes(self, block: Block) -> None:
        """Check recipes and keys of what takes too long to run."""
        for command in joined(block.text).splitlines():
            if command.startswith(("whet run ", "whet check ")):
                _, _, recipe, *overrides = shlex.split(command, comments=True)
                load_config(recipe, [word for word in overrides if not word.startswith("-")])


def whet(command: str) -> tuple[int, str]:
    """Run `whet ...` in this process; give its exit code and all that it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = group.main(shlex.split(command, comments=True)[1:], prog_name="whet", standalone_mode=False)
        except click.ClickException as error:
            error.show()
            code = error.exit_code
    return code or 0, output.getvalue()


def joined(text: str) -> str:
    """Join lines that a backslash continues; leave out those that are empty or a remark."""
    lines = text.replace("\\\n", "").splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.startswith("#"))


def read_recipe(text: str) -> None:
    """Load a recipe, or a part of one laid over a small one."""
    document = yaml.safe_load(text)
    assert isinstance(document, dict), "a YAML block that is no recipe is marked `not run: WHY`"
    base = {} if "extends" in document else SMALL
    Path("part.yaml").write_text(text if not base else yaml.safe_dump({**base, **document}), encoding="utf-8")
    load_config("part.yaml")


READERS: dict[str, Callable[[str], object]] = {
    "yaml": read_recipe,
    "json": json.loads,
    "toml": tomllib.loads,
    "text": lambda text: None,
    "{eval-rst}": lambda text: None,  # built by tests/docs/test_site.py
}


def unmarked() -> Iterator[str]:
    for page in PAGES:
        for block in blocks(page):
            known = block.mark == "run" or block.mark.startswith(("file=", "not run: "))
            if not known and (block.mark or block.language not in READERS):
                yield block.where


def test_every_block_is_run_or_says_why_not():
    assert not list(unmarked()), "see the docstring of tests/docs/test_pages.py"


def test_something_is_run():
    assert sum(block.mark == "run" for page in PAGES for block in blocks(page)) > 20


def test_a_failing_block_is_named_by_page_and_line(request, sandbox):
    page = sandbox / "page.md"
    page.write_text("# Title\n\n```python run\nfirst = 1\nassert first == 2\n```\n")
    (block,) = blocks(page)
    with pytest.raises(AssertionError) as caught:
        Doer(request, sandbox, page, apart=False).do(block)
    assert caught.traceback[-1].path == page
    assert caught.traceback[-1].lineno + 1 == 5


def test_output_that_is_not_as_shown_is_refused(request, sandbox):
    block = Block(sandbox / "page.md", 1, "console", "run", "$ whet --version\nwhet, version 99\n")
    with pytest.raises(AssertionError, match="but it is"):
        Doer(request, sandbox, block.page, apart=False).do(block)


def test_a_part_of_a_recipe_with_a_wrong_key_is_refused(sandbox):
    with pytest.raises(Exception, match="max_tokens"):
        read_recipe("rollout: {max_token: 3}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
            assert not os.path.isabs(target)


def test_the_page_for_authors_of_plugins_lists_what_import_whet_has():
    text = (ROOT / "docs" / "reference" / "api" / "plugins.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## `import whet`")
    assert set(re.findall(r"`whet\.(\w+)`", section.partition("\n## ")[0])) == set(names_of_whet)
