"""What the documentation tells people to type works.

```bash run                     executed by bash, which stops at the first command that fails
```python run                   executed by Python
```yaml file=PATH               written to PATH (any language)
```bash                         shown only; `whet run` and `whet check` must load their recipe all the same
"""

import re
import shlex
from pathlib import Path

import pytest
from attrs import frozen

FENCE = re.compile(r"^```(\w+)(?: +([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("plugins/*/*/README.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)


@frozen
class Block:
    """A fenced code block."""

    language: str
    mark: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2] or "", m[3], text.count("\n", 0, m.start()) + 1) for m in FENCE.finditer(text)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runnable() -> list[Path]:
    return [page for page in PAGES if any(block.mark for block in blocks(page))]


def shown_commands() -> list[tuple[str, str]]:
    """Give (page and line, command) of each `whet run` and `whet check` of a recipe of this repository."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            for i, line in enumerate(block.text.splitlines(), 1):
                if block.language == "bash" and not block.mark and line.startswith(("whet run ", "whet check ")):
                    found.append((f"{name(page)}:{block.line + i}", line))
    return found


def test_there_is_something_to_run():
    assert runnable()


@pytest.mark.slow
@pytest.mark.parametrize("page", runnable(), ids=name)
def test_a_page_runs_from_top_to_bottom(page, shell, tmp_path):
    for block in blocks(page):
        perform(block, shell, tmp_path)


def perform(block: Block, shell, folder: Path) -> None:
    if block.mark.startswith("file="):
        path = folder / block.mark.removeprefix("file=")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    elif block.mark == "run" and block.language == "bash":
        shell(block.text, folder)
    elif block.mark == "run" and block.language == "python":
        (folder / "block.py").write_text(block.text, encoding="utf-8")
        shell("python block.py", folder)
    else:
        assert not block.mark, f"line {block.line}: nobody knows how to do {block.language!r} {block.mark!r}"


@pytest.mark.parametrize(("where", "command"), shown_commands(), ids=lambda value: value.partition(" ")[0])
def test_a_recipe_that_is_shown_loads_with_its_overrides(where, command, tmp_path):
    from whet.config.load import load_config

    _, _, recipe, *overrides = shlex.split(command, comments=True)
    path = ROOT / recipe
    if not path.exists():
        shown = [block for block in blocks(ROOT / where.partition(":")[0]) if block.mark == f"file={recipe}"]
        assert shown, f"{where} names {recipe}, which is neither in the repository nor on the page"
        path = tmp_path / recipe
        path.write_text(shown[0].text, encoding="utf-8")
    load_config(path, [word for word in overrides if not word.startswith("-")])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"
