"""Nothing is offered that the documentation does not know: hooks, sections, commands, components, public modules."""

import re
from pathlib import Path

import attrs
import click
import pytest

from whet.cli.app import group
from whet.component import KINDS
from whet.plugins import hookspecs
from whet.plugins.registry import load_plugins
from whet_start.explain import sections, selections

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("tutorials", "how-to", "explanation")
GUIDES = "\n".join(page.read_text(encoding="utf-8") for name in FOLDERS for page in DOCS.glob(f"{name}/*.md"))
"""What people read, as opposed to look up."""
COMPONENTS = sorted((kind, name) for kind in KINDS for name in load_plugins().offers(kind))
PUBLIC = ("interfaces", "ops", "data")


def commands() -> list[str]:
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return [
        f"whet {name}" if not isinstance(command, click.Group) else f"whet {name} {inner}"
        for name, command in found.items()
        for inner in (command.commands if isinstance(command, click.Group) else [""])
    ]


@pytest.mark.parametrize("name", [name for name in vars(hookspecs) if name.startswith("whet_")])
def test_a_hook_is_in_the_reference(name):
    assert f"## `{name}`" in (DOCS / "reference" / "hooks.md").read_text()


@pytest.mark.parametrize("path", sorted({*sections(), *selections()}))
def test_a_section_is_in_the_reference_and_in_a_guide(path):
    top, *inner = path.split(".")
    page = (DOCS / "reference" / "config.md").read_text()
    assert f"## `{top}`" in page
    assert not inner or re.search("`" + re.escape(path).replace(r"\.", r"\.(?:N\.|NAME\.)?"), page)
    assert re.search(rf"\b{top}\b[:.`]", GUIDES), f"no guide says anything of `{top}:`"


@pytest.mark.parametrize("command", commands())
def test_a_command_is_in_the_reference_and_in_a_guide(command):
    assert f"## `{command}`" in (DOCS / "reference" / "cli.md").read_text()
    assert command in GUIDES, f"no guide uses `{command}`"


@pytest.mark.parametrize(("kind", "name"), COMPONENTS)
def test_a_component_is_in_the_reference_and_in_its_readme(kind, name):
    assert f"## `{name}`" in (DOCS / "reference" / "components" / f"{kind}.md").read_text()
    assert f"components/{kind}.md#{name}" in (DOCS / "reference" / "components.md").read_text()
    package = load_plugins().offers(kind)[name].component.config.__module__.partition(".")[0]
    (readme,) = ROOT.glob(f"plugins/*/*/src/{package}/../../README.md")
    assert name in readme.read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PUBLIC)
def test_public_modules_are_in_the_api_reference(package):
    pages = "\n".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    # Parts of public modules, which plugins do not import.
    inner = {"bounded", "files", "pieces", "spans", "templates", "tokenizer_files", "undecided"}
    for module in (ROOT / "core" / "src" / "whet" / package).glob("[a-z]*.py"):
        assert module.stem in inner or f"automodule:: whet.{package}.{module.stem}\n" in pages, module.stem


@pytest.mark.parametrize("page", ["backends", "generators", "weights"])
def test_every_part_for_authors_has_an_example_that_runs(page):
    text = (DOCS / "reference" / "api" / f"{page}.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        assert "```python run\n" in section, section.partition("\n")[0]


def test_every_contract_is_in_the_reference():
    page = (DOCS / "reference" / "contracts.md").read_text()
    for module in (ROOT / "plugins" / "tools" / "testing" / "src" / "whet_testing" / "contracts").glob("[a-z]*.py"):
        for name in re.findall(r"^class (\w+Contract)\b", module.read_text(), re.MULTILINE):
            assert f"## `{name}`" in page


@pytest.mark.parametrize(
    "word",
    [
        "LoRA", "FP8", "MLflow", "SwanLab", "Slurm", "Docker", "Multi-node", "Tensor parallel", "Context parallel",
        "MoE", "Experts", "Megatron", "quantisation", "multimodal", "Images", "MCP", "Code sandbox",
        "Pipeline parallel",
    ],
)  # fmt: skip
def test_what_people_look_for_in_vain_is_named_on_a_page_of_its_own(word):
    page = (DOCS / "explanation" / "not-there-yet.md").read_text(encoding="utf-8")
    assert re.search(rf"\b{word}\b", page, re.IGNORECASE), f"the search finds nothing for {word!r}"


def test_what_is_not_there_is_not_there():
    """A component or key that comes in takes its word off the page of what is missing."""
    names = {name for _, name in COMPONENTS}
    assert not names & {"mlflow", "swanlab", "mcp", "sandbox", "lora"}
    assert not {"qlora", "quantization"} & {
        key for kind, name in COMPONENTS if kind == "backends"
        for key in attrs.fields_dict(load_plugins().offers(kind)[name].component.config)
    }  # fmt: skip
    assert not list(ROOT.glob("Dockerfile*")), "then `Docker` has something to say"
