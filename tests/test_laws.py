"""The laws of the repository: what core may know, what a plugin may know, and what stays light."""

import ast
import configparser
import importlib.util
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
NEEDED = {"gymnasium-grpo": "gymnasium", "reasoning-gym-grpo": "reasoning_gym"}
"""Libraries without which a recipe is refused: its environments run them in sandboxes."""
HEAVY = ("torch", "ray", "aiohttp", "transformers", "datasets", "vllm", "sglang", "matplotlib", "math_verify", "sympy")
CATALOG = json.loads((ROOT / "core" / "src" / "whet" / "plugins" / "catalog.json").read_text(encoding="utf-8"))
TOOLS = [plugin for plugin in PLUGINS if plugin.parent.name in ("tools", "launchers")]
"""Plugins that offer no component: they bring commands, a launcher, or a feature by a hook of its own."""
LIBRARIES = {f"whet_{plugin.name}" for plugin in PLUGINS if plugin.parent.name == "libraries"}
"""Packages that several plugins import. They register nothing and import core alone."""
STANDS_ON = {"whet_training": {"whet_weights"}}
"""The libraries that a library may import: the files of adapters have the format in which adapters travel."""
TOGETHER = {"whet_demo"}
"""What requires plugins, so that they are installed together. It imports none of them."""
KIT = "whet_testing"
"""What tests may import, and no code that is shipped."""
every_plugin = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)


def project(plugin: Path) -> dict[str, Any]:
    return dict(tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def entry_points(plugin: Path, group: str) -> dict[str, str]:
    return dict(project(plugin).get("entry-points", {}).get(group, {}))


def package(plugin: Path) -> str:
    (folder,) = [path for path in (plugin / "src").iterdir() if path.name.startswith("whet_")]
    return folder.name


def imports(file: Path) -> Iterator[str]:
    """Return the first name of every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def heavy_after(code: str, *arguments: str) -> list[str]:
    """Run code in a fresh interpreter, and return which heavy packages it has imported."""
    code = f"import sys\n{code}\nprint('loaded:', *sorted(set({HEAVY!r}) & set(sys.modules)))"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


# What stays light


def test_importing_whet_loads_nothing_heavy() -> None:
    assert heavy_after("import whet") == []


def test_loading_the_plugins_loads_nothing_heavy_and_breaks_nothing() -> None:
    code = "from whet.plugins.registry import load_plugins\nbroken = load_plugins().broken\nassert not broken, broken"
    assert heavy_after(code) == []


def test_structuring_and_planning_recipes_loads_nothing_heavy() -> None:
    """One process plans all of them: a module stays loaded, so each recipe answers for what was not there before."""
    code = f"""
from whet.plan.load import load_config
from whet.plan.placement import Machine
from whet.plan.plan import gather_facts, make_plan
from whet.plan.roles import make_roles
from whet.data.model_info import ModelInfo
SIZES = {{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}}
HEADS = {{"num_key_value_heads": 2, "head_dim": 32}}
OTHERS = {{"vocab_size": 1000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu"}}
for recipe in sys.argv[1:]:
    experts = {{"num_experts": 8, "num_experts_per_tok": 2}} if "moe" in recipe else {{}}
    model = ModelInfo("somewhere", {{"model_type": "qwen3", **SIZES, **HEADS, **OTHERS, **experts}})
    config = load_config(recipe).config
    plan, problems = make_plan(config, model, make_roles(config, gather_facts(config, model)), Machine(cores=2))
    assert plan is not None, (recipe, problems)
    assert not set({HEAVY!r}) & set(sys.modules), recipe
"""
    missing = {name for name, needed in NEEDED.items() if importlib.util.find_spec(needed) is None}
    planned = [str(recipe) for recipe in RECIPES if recipe.stem not in missing]
    assert planned
    assert heavy_after(code, *planned) == []


@pytest.mark.parametrize("command", [["--help"], ["plugins"], ["schema"], ["recipe"], ["demo", "--help"]], ids=" ".join)
def test_a_command_that_only_shows_something_loads_nothing_heavy(command: list[str]) -> None:
    code = "from whet.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    assert heavy_after(code, *command) == []


# Who knows whom


def test_core_names_no_plugin() -> None:
    """Its catalog does, but that is data, written from the plugins' own metadata: see tests/test_packages.py."""
    names = [name for plugin in PLUGINS for name in (package(plugin), project(plugin)["name"])]
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    for file in (ROOT / "core" / "src").rglob("*"):
        if file.suffix in (".py", ".yaml", ".toml", ".md", ".jinja", ".txt", ".html"):
            found = pattern.search(file.read_text(encoding="utf-8"))
            assert found is None, f"{file.relative_to(ROOT)} names {found and found.group()}"


COMMANDS = {command for plugin in PLUGINS for command in entry_points(plugin, "whet.commands")}
COMPONENTS = {name for names in CATALOG["components"].values() for name in names}
PLAIN = {
    "arithmetic", "calculator", "code", "config", "console", "data", "demo", "distill", "env", "eval", "export",
    "hinge", "import", "jsonl", "judge", "math", "memory", "new", "plot", "plugins", "recipe", "reinforce", "report",
    "schema", "serve", "tensorboard",
}  # fmt: skip
"""Names of components and commands that core also uses as words of English or as formats."""
ELSEWHERE = {"ray"}  # until its launcher has left core


def names_in(source: str) -> set[str]:
    """Return the components and commands that Python code names, in identifiers, strings or comments.

    A plain word counts after `use:`, or after `whet` where it is a command. Any other name counts wherever it stands.
    """
    found: set[str] = set()
    kinds = (tokenize.NAME, tokenize.STRING, tokenize.COMMENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            words = set(re.findall(r"(?<![\w-])[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])", token.string))
            found |= words & (COMPONENTS | COMMANDS) - PLAIN
            found |= set(re.findall(r"\buse: *['\"]?([a-z0-9-]+)", token.string)) & COMPONENTS
            found |= set(re.findall(r"\bwhet ([a-z]+)\b", token.string)) & COMMANDS
    return found - ELSEWHERE


def test_core_names_no_component_and_no_command_of_a_plugin() -> None:
    assert len(COMPONENTS) > 50
    assert {"report", "new", "demo", "data"} <= COMMANDS
    files = list((ROOT / "core" / "src").rglob("*.py"))
    assert len(files) > 100
    found = {file.relative_to(ROOT): names for file in files if (names := names_in(file.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("if backend == 'fsdp2': pass", {"fsdp2"}),
        ("import vllm", {"vllm"}),
        ("# as grpo does", {"grpo"}),
        ('"""Show it, e.g. `clipped-pg`."""', {"clipped-pg"}),
        ('say("`whet report RUN` makes a page")', {"report"}),
        ('f"whet report {folder}"', {"report"}),
        ('{"loggers": "{use: jsonl}"}', {"jsonl"}),
        ('report = "data of a plot"; file = "metrics.jsonl"', set()),
        ("whet_grpo_like = 'grpo_like'", set()),
    ],
)
def test_a_name_of_a_plugin_in_code_would_be_found(source: str, named: set[str]) -> None:
    assert names_in(source) == named


@pytest.mark.parametrize(("folder", "allowed"), [("src", set()), ("tests", {KIT})])
def test_core_imports_no_plugin(folder: str, allowed: set[str]) -> None:
    for file in (ROOT / "core" / folder).rglob("*.py"):
        plugins = {name for name in imports(file) if name.startswith("whet_")} - allowed
        assert not plugins, f"{file.relative_to(ROOT)} imports {', '.join(plugins)}"


@every_plugin
def test_a_plugin_imports_no_other(plugin: Path) -> None:
    for file in plugin.rglob("*.py"):
        allowed = {package(plugin)} | ({KIT} if plugin / "tests" in file.parents else set())
        allowed |= LIBRARIES if package(plugin) not in LIBRARIES else STANDS_ON.get(package(plugin), set())
        others = {name for name in imports(file) if name.startswith("whet_")} - allowed - beside(file)
        assert not others, f"{file.relative_to(ROOT)} imports {', '.join(others)}"


def beside(file: Path) -> set[str]:
    """Return the modules beside a file. A program that another interpreter runs imports these by their own name."""
    return {other.stem for other in file.parent.glob("*.py")} if file.parent.name == "inside" else set()


@every_plugin
def test_a_plugin_requires_core_and_no_other_plugin(plugin: Path) -> None:
    whet = [need for need in project(plugin)["dependencies"] if re.match(r"whet\b", need)]
    known = map(package, PLUGINS) if package(plugin) in TOGETHER else LIBRARIES
    others = {name.replace("_", "-") for name in known} - {project(plugin)["name"]}
    names = [re.fullmatch(r"([a-z0-9-]+)(?:\[torch\])?>=[\d.]+,<[\d.]+", need) for need in whet]
    assert all(names), f"{whet}, wanted bounds on both sides"
    found = [name.group(1) for name in names if name]
    assert found[:1] == ["whet"], f"{whet}, wanted core first"
    assert set(found[1:]) <= others, f"{whet}, wanted core and libraries alone"


IMPORTED_AS = {"pyyaml": "yaml", "megatron_core": "megatron"}
"""Modules of distributions with other names."""


@every_plugin
def test_a_plugin_requires_what_it_imports(plugin: Path) -> None:
    chosen = [need for needs in project(plugin).get("optional-dependencies", {}).values() for need in needs]
    needs = [*project(plugin)["dependencies"], *chosen]
    required = {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in needs}
    core = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    given = {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in core}
    modules = {module for name, module in IMPORTED_AS.items() if name in required | given}
    known = required | given | modules | {package(plugin)} | set(sys.stdlib_module_names)
    for file in (plugin / "src").rglob("*.py"):
        missing = set(imports(file)) - known - beside(file)
        assert not missing, f"{file.relative_to(ROOT)} imports {', '.join(missing)}, which pyproject.toml does not name"


def test_the_import_contracts_know_every_plugin() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    packages = {package(plugin) for plugin in PLUGINS}
    assert set(parser["importlinter"]["root_packages"].split()) == packages | {"whet"}
    assert set(parser["importlinter:contract:core-imports-no-plugin"]["forbidden_modules"].split()) == packages
    assert set(parser["importlinter:contract:plugins-are-independent"]["modules"].split()) == packages - LIBRARIES
    library = parser["importlinter:contract:libraries-know-no-plugin"]
    assert set(library["source_modules"].split()) == LIBRARIES
    assert set(library["forbidden_modules"].split()) == packages - LIBRARIES
    light = parser["importlinter:contract:hooks-and-configs-are-light"]["source_modules"].split()
    assert {module.partition(".")[0] for module in light} - LIBRARIES == packages - LIBRARIES


# What a plugin looks like


@every_plugin
def test_a_plugin_has_the_same_few_files(plugin: Path) -> None:
    source = plugin / "src" / package(plugin)
    wanted = [plugin / name for name in ("README.md", "CHANGELOG.md", "tests")]
    wanted += [source / name for name in ("__init__.py", "py.typed")]
    if entry_points(plugin, "whet"):
        wanted += [plugin / "tests" / "test_conformance.py", source / "hooks.py"]
    if plugin not in TOOLS and package(plugin) not in LIBRARIES:
        wanted += [source / "config.py"]
    missing = [str(path.relative_to(ROOT)) for path in wanted if not path.exists()]
    assert not missing, f"missing: {', '.join(missing)}"


@every_plugin
def test_a_plugin_is_named_after_its_thing(plugin: Path) -> None:
    found = project(plugin)
    assert found["name"].replace("-", "_") == package(plugin)
    hooks, commands = list(entry_points(plugin, "whet").values()), entry_points(plugin, "whet.commands")
    assert hooks in ([f"{package(plugin)}.hooks"], [])
    assert hooks or (commands and plugin in TOOLS) or package(plugin) in LIBRARIES
    converts = ROOT / "plugins" / "backends" in plugin.parents and set(commands) <= {"import", "to-megatron"}
    assert plugin in TOOLS or package(plugin) in LIBRARIES or converts or not commands
    assert {target.partition(".")[0] for target in commands.values()} <= {package(plugin)}
    assert (ROOT / "plugins" / "environments" in plugin.parents) == found["name"].startswith("whet-env-")


@every_plugin
def test_a_plugin_says_what_it_is_for_and_what_changed(plugin: Path) -> None:
    name, version = project(plugin)["name"], project(plugin)["version"]
    readme = (plugin / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"# {name}\n"), "the README begins with the distribution's name"
    if entry_points(plugin, "whet"):
        shown = "use: " if plugin not in TOOLS else "```yaml"
        assert shown in readme, "the README shows what to write into a config"
    assert all(f"whet {command}" in readme for command in entry_points(plugin, "whet.commands"))
    assert version in (plugin / "CHANGELOG.md").read_text(encoding="utf-8"), "the CHANGELOG knows this version"


@every_plugin
def test_importing_a_plugin_has_no_effect(plugin: Path) -> None:
    targets = [t for group in ("whet", "whet.commands", "whet.launchers") for t in entry_points(plugin, group).values()]
    modules = ", ".join({target.partition(":")[0] for target in targets} or {package(plugin)})
    code = f"import os\nbefore = dict(os.environ)\nimport {modules}\nassert dict(os.environ) == before"
    assert heavy_after(code) == []


# What every config has


def test_every_number_of_every_component_has_a_lower_and_an_upper_bound() -> None:
    from whet.component import KINDS
    from whet.plugins.registry import load_plugins
    from whet_testing.field_docs import unbounded

    registry = load_plugins()
    offers = [(kind, name, offer) for kind in KINDS for name, offer in registry.offers(kind).items()]
    assert len(offers) > 30
    found = {f"{kind}/{name}": unbounded(offer.component.config) for kind, name, offer in offers}
    assert {name: fields for name, fields in found.items() if fields} == {}


# How functions are described

REFUSED_OPENINGS = {"Give", "Gives", "Say", "Says", "Tell", "Let", "Have", "Note", "Of"}
"""A function that returns something begins its docstring with "Return", one that acts with the act."""


def openings(file: Path) -> Iterator[tuple[int, str]]:
    """Return the line and the first word of the docstring of each function in a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text.split()[0].strip(".,:;")


def test_no_function_is_described_by_a_vague_word() -> None:
    folders = ("core", "plugins", "tests", "docs", "benchmarks", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = [(file.relative_to(ROOT), line, word) for file in files for line, word in openings(file)]
    assert found
    assert [where for where in found if where[2] in REFUSED_OPENINGS] == []


def test_no_template_of_a_package_describes_anything_by_a_vague_word() -> None:
    files = [*ROOT.glob("core/src/**/*.py.template"), *ROOT.glob("plugins/*/*/src/**/*.py.template")]
    assert files
    found = {file.relative_to(ROOT): re.findall(r'"""(\w+)', file.read_text(encoding="utf-8")) for file in files}
    assert {file: words for file, words in found.items() if REFUSED_OPENINGS.intersection(words)} == {}
