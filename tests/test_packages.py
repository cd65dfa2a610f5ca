"""Packages as an index and a user meet them: what is in a wheel and in an sdist, and what they say of themselves.

They are built in this process, without a network. `nox -s packages` installs them.
"""

import importlib.util
import json
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from whet.plan.load import load_config
from whet.plan.roles import selections
from whet.plugins.registry import load_plugins

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["whet"]["repository"]
LICENCE = (ROOT / "LICENSE").read_text(encoding="utf-8")
CATALOG = json.loads((ROOT / "core" / "src" / "whet" / "plugins" / "catalog.json").read_text(encoding="utf-8"))
BUNDLED = {
    "sft": "learn-sft", "dpo": "learn-dpo", "rm": "learn-rm", "grpo": "quickstart-grpo", "ppo": "learn-ppo",
    "distill": "learn-distill",
}  # fmt: skip
"""The run that a bundle is for."""
every_distribution = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)


@frozen
class Built:
    """A distribution as it is uploaded."""

    metadata: Message
    wheel: Mapping[str, bytes]
    """Contents by path, without the folder of metadata."""
    info: Mapping[str, bytes]
    """What is in the folder of metadata."""
    sdist: Mapping[str, bytes]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Path, Built]:
    out = tmp_path_factory.mktemp("built")
    return {folder: build(folder, out) for folder in FOLDERS}


def build(folder: Path, out: Path) -> Built:
    (wheel,) = WheelBuilder(str(folder)).build(directory=str(out), versions=["standard"])
    (sdist,) = SdistBuilder(str(folder)).build(directory=str(out), versions=["standard"])
    with zipfile.ZipFile(wheel) as file:
        held = {name: file.read(name) for name in file.namelist()}
    info = {name.partition("/")[2]: text for name, text in held.items() if ".dist-info/" in name}
    code = {name: text for name, text in held.items() if ".dist-info/" not in name}
    with tarfile.open(sdist) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        source = {m.name.partition("/")[2]: tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]
    return Built(HeaderParser().parsestr(info["METADATA"].decode()), code, info, source)


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def offers(folder: Path) -> bool:
    """Return whether a distribution has a component, a feature or a command; a library comes with what needs it."""
    return bool({"whet", "whet.commands", "whet.chats"} & set(project(folder)["project"].get("entry-points", ())))


@every_distribution
def test_a_distribution_says_who_made_it_what_it_is_and_under_which_licence(folder, built):
    metadata = built[folder].metadata
    assert metadata["Author"] == "The whet authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Keywords"]
    assert metadata["Requires-Python"] == ">=3.11"
    classifiers = metadata.get_all("Classifier")
    assert {line.partition(" ::")[0] for line in classifiers} >= {"Development Status", "Topic", "Typing"}
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    assert urls["Source"].endswith(f"/{folder.relative_to(ROOT).as_posix()}")


@every_distribution
def test_the_licence_is_in_the_wheel_and_in_the_sdist(folder, built):
    assert built[folder].info["licenses/LICENSE"].decode() == LICENCE
    assert built[folder].sdist["LICENSE"].decode() == LICENCE


@every_distribution
def test_all_files_of_a_package_are_in_its_wheel_and_in_its_sdist(folder, built):
    files = [path for path in (folder / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = {path.relative_to(folder / "src").as_posix(): path.read_bytes() for path in files}
    assert built[folder].wheel == names
    assert {f"src/{name}" for name in names} <= set(built[folder].sdist)
    assert {"README.md", "CHANGELOG.md", "pyproject.toml"} <= set(built[folder].sdist)


@every_distribution
def test_a_readme_makes_sense_on_a_page_of_its_own(folder, built):
    name, text = project(folder)["project"]["name"], (folder / "README.md").read_text(encoding="utf-8")
    metadata = built[folder].metadata
    assert metadata.get_payload().strip() == text.strip()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert re.search(rf"pip install '?{name}|pip install 'whet\[", text), "it says how to install it"
    assert "```yaml" in text or folder.parent.name in ("tools", "libraries"), "it shows what to write into a config"
    assert f"{REPOSITORY}/blob/main/docs/README.md" in text, "it leads to the documentation"


@pytest.mark.parametrize("folder", [*FOLDERS, *sorted(ROOT.glob("examples/*/pyproject.toml"))], ids=str)
def test_a_packaged_readme_has_no_relative_link_and_none_that_leads_nowhere(folder):
    readme = (folder if folder.is_dir() else folder.parent) / "README.md"
    targets = re.findall(r"\]\(([^)\s]+)\)", readme.read_text(encoding="utf-8"))
    relative = [target for target in targets if "://" not in target and not target.startswith("#")]
    assert not relative, f"an index shows {readme} without the repository around it"
    for target in targets:
        if target.startswith(f"{REPOSITORY}/"):
            path = re.sub(r"^(blob|tree)/main/", "", target.removeprefix(f"{REPOSITORY}/").partition("#")[0])
            assert (ROOT / path).exists(), f"{readme} links to {path}"


def test_what_packages_ship_agrees_with_its_sources():
    packaged = load_module(ROOT / "docs" / "packaged.py")
    wanted = packaged.files(ROOT, load_plugins())
    outdated = [name for name, text in wanted.items() if not same(ROOT / name, text)]
    assert not outdated, "run `python docs/generate_reference.py`"
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("plugins/*/*/src/*/recipes/*")}
    assert there <= set(wanted), "recipes that no pyproject.toml lists"


def test_every_recipe_is_shipped_by_one_plugin_together_with_what_it_extends():
    assert set(CATALOG["recipes"]) == {path.stem for path in ROOT.glob("recipes/*.yaml")}
    for path in ROOT.glob("plugins/*/*/src/*/recipes/*.yaml"):
        extended = re.search(r"^extends: *(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not extended or (path.parent / extended[1]).is_file(), f"{path} extends what is not beside it"


def test_bundles_name_distributions_of_this_repository_in_versions_that_there_are():
    versions = {project(folder)["project"]["name"]: project(folder)["project"]["version"] for folder in FOLDERS}
    extras = project(ROOT / "core")["project"]["optional-dependencies"]
    assert set(CATALOG["bundles"]) == {*BUNDLED, "endpoint", "ray", "all", "testing"}
    libraries = {project(folder)["project"]["name"] for folder in FOLDERS[1:] if not offers(folder)}
    assert set(CATALOG["bundles"]["all"]) == set(versions) - {"whet", *CATALOG["bundles"]["testing"], *libraries}
    from packaging.requirements import Requirement

    needs = [Requirement(line) for name in CATALOG["bundles"] for line in extras[name]]
    for needed in (need for need in needs if need.name.startswith("whet-")):
        assert needed.specifier.contains(versions[needed.name]), str(needed)


@pytest.mark.parametrize(("bundle", "recipe"), BUNDLED.items())
def test_a_bundle_brings_all_that_its_first_run_uses(bundle, recipe):
    config = load_config(ROOT / "recipes" / f"{recipe}.yaml").config
    used = {selection.distribution for _, selection in selections(config)}
    assert used <= set(CATALOG["bundles"][bundle])


def test_whoever_installs_the_demo_can_run_the_recipes_that_it_leads_to():
    needs = {need.partition(">")[0] for need in project(ROOT / "plugins" / "tools" / "demo")["project"]["dependencies"]}
    assert set(CATALOG["bundles"]["grpo"]) <= needs
    assert "pip install whet-demo" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_on_installing_has_every_bundle_with_its_plugins():
    page = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `'whet\[(\w+)\]'` \| (.*) \|$", page, re.MULTILINE))
    for bundle, held in CATALOG["bundles"].items():
        told = set(re.findall(r"`(whet-[\w-]+)`", rows[bundle]))
        assert told == set(held) or (bundle == "all" and told == set(held) - set(others(bundle)))
    extras = set(project(ROOT / "core")["project"]["optional-dependencies"]) - set(CATALOG["bundles"])
    assert all(f"| `{extra}` |" in page for extra in extras)


def others(bundle: str) -> Iterator[str]:
    """Yield the plugins that the rows above the bundle name."""
    for name, held in CATALOG["bundles"].items():
        yield from held if name != bundle else ()


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text
