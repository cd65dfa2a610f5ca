"""How Sphinx builds the site, `nox -s docs`: from the repository's own Markdown, with the links that GitHub follows."""

import gc
from pathlib import Path
from typing import Any

import whet

ROOT = Path(__file__).resolve().parents[1]
gc.disable()  # the trees of all pages stay until the end, and looking through them for garbage takes half of a build

project = "whet"
version = release = whet.__version__
copyright = "the authors of whet, Apache-2.0"  # Sphinx wants this very name
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]

# The source folder is the repository, so that a page of docs/ can link to the README of a plugin.
root_doc = "docs/README"
include_patterns = [
    "README.md", "CONTRIBUTING.md", "docs/*.md", "docs/**/*.md", "plugins/*/*/README.md", "examples/*/README.md",
]  # fmt: skip
exclude_patterns = ["docs/_build", ".*", "runs", "models"]

HOW_TO = (
    "install", "sft-on-your-data", "own-environment", "foreign-agent", "own-reward", "own-loss",
    "rewards-with-an-address", "templates", "own-advantages-or-filter", "own-hooks", "own-generator", "own-backend",
    "write-a-plugin", "write-a-recipe",
    "read-metrics", "read-a-report", "track-a-run",
    "resume", "evaluate", "debug", "use-as-a-library", "gsm8k", "memory",
)  # fmt: skip
CONTENTS = {
    "docs/README": {
        "Tutorials": ["tutorials/first-run", "tutorials/*"],
        "How-to": [*(f"how-to/{page}" for page in HOW_TO), "how-to/*"],
        "Reference": [
            "reference/config",
            "reference/components",
            "reference/cli",
            "reference/hooks",
            "reference/interfaces",
            "reference/*",
        ],
        "Plugins": ["/plugins/*/*/README"],
        "Explanation": ["explanation/architecture", "explanation/*"],
        "Project": ["/README", "/CONTRIBUTING", "/examples/*/README"],
    },
    "docs/reference/components": {"": ["components/*"]},
    "docs/reference/api": {"": ["api/interfaces", "api/*"]},
}
"""The tables of contents, by page. They are added here: on the page GitHub would show them as code."""

html_theme = "furo"
html_title = f"whet {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "front.html"}
html_show_sphinx = html_copy_source = False
templates_path = ["_templates"]
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = False

myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_mock_imports = ["torch", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
toc_object_entries_show_parents = "hide"
default_role = "code"
# Not nitpicky: signatures name types of other projects, and of parts behind the public ones.
maximum_signature_line_length = 100
python_use_unqualified_type_names = True


def setup(app: Any) -> None:
    """Connect what the settings above cannot say."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", lambda *_: gc.freeze())  # the interpreter's end would look through them, too
    app.connect("autodoc-process-docstring", to_literal_blocks)
    app.connect("autodoc-process-signature", readable_signature)


def add_contents(app: Any, page: str, source: list[str]) -> None:
    """Add its table of contents to a page."""
    for caption, pages in CONTENTS.get(page, {}).items():
        options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
        source[0] += "\n".join(["", "```{toctree}", *options, *pages, "```", ""])


def to_literal_blocks(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show indented paragraphs of docstrings as they stand: formulas and examples, not quotations."""
    literal = False
    for i in reversed(range(len(lines))):
        if lines[i].startswith("    "):
            literal = True
        elif lines[i] and literal and (i + 1 == len(lines) or not lines[i + 1]):
            lines[i + 1 : i + 1] = ["", "::"]
            literal = False
        elif lines[i]:
            literal = False


def readable_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show a default that attrs computes as `...`, and nothing where a Protocol takes what its implementation does."""
    made_up = what == "class" and signature == "(*args, **kwargs)"
    return "" if made_up else signature and signature.replace("= NOTHING", "= ..."), returns
