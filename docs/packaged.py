"""What distributions hold that is written elsewhere: the licence, recipes, and core's catalog of what there is.

A distribution lists the recipes that it ships in its `pyproject.toml`, under `[tool.whet]`; they are copied from
`recipes/`, so that an installed package and an editable one have them alike. `docs/generate_reference.py` writes all of
it.

A distribution lists the features that it brings to core, beside components, under `[tool.whet]`, too: an error of core
then names the distribution to install.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.component import KINDS
from whet.plugins.registry import Registry

CATALOG = "core/src/whet/plugins/catalog.json"


def files(root: Path, registry: Registry) -> dict[str, str]:
    """Return the text of every file by its path in the repository."""
    projects = {file.parent: tomllib.loads(file.read_text(encoding="utf-8")) for file in project_files(root)}
    made = {CATALOG: catalog(root / "core", projects, registry)}
    licence = (root / "LICENSE").read_text(encoding="utf-8")
    for folder, project in projects.items():
        made[f"{folder.relative_to(root)}/LICENSE"] = licence
        for name in shipped(project):
            recipe = (root / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
            made[f"{package(folder).relative_to(root)}/recipes/{name}.yaml"] = recipe
    return made


def project_files(root: Path) -> list[Path]:
    """Return the `pyproject.toml` of core and of every plugin."""
    return [root / "core" / "pyproject.toml", *sorted(root.glob("plugins/*/*/pyproject.toml"))]


def package(folder: Path) -> Path:
    """Return the folder of a distribution's code."""
    (found,) = (path for path in (folder / "src").iterdir() if (path / "__init__.py").is_file())
    return found


def shipped(project: Mapping[str, Any]) -> list[str]:
    """Return the names of the recipes that a distribution ships: its own, and those of others that these extend."""
    told = project.get("tool", {}).get("whet", {})
    return [*told.get("recipes", ()), *told.get("bases", ())]


def catalog(core: Path, projects: Mapping[Path, Mapping[str, Any]], registry: Registry) -> str:
    """Write the catalog as `whet.plugins.catalog` reads it."""
    plugins = {folder: project for folder, project in projects.items() if folder != core}
    named = {project["project"]["name"]: project for project in plugins.values()}
    extras = projects[core]["project"]["optional-dependencies"]
    bundles = {extra: held for extra, needs in extras.items() if (held := [n for n in map(_name, needs) if n in named])}
    recipes = {
        recipe: name for name, project in named.items()
        for recipe in project.get("tool", {}).get("whet", {}).get("recipes", ())
    }  # fmt: skip
    features = {
        feature: name for name, project in named.items()
        for feature in project.get("tool", {}).get("whet", {}).get("features", ())
    }  # fmt: skip
    commands = {
        command: name for name, project in named.items()
        for command in project["project"].get("entry-points", {}).get("whet.commands", ())
    }  # fmt: skip
    document = {
        "distributions": {name: named[name]["project"]["description"] for name in sorted(named)},
        "components": {
            kind: {
                name: offer.distribution
                for name, offer in registry.offers(kind).items() if offer.distribution in named
            }
            for kind in KINDS
        },
        "recipes": dict(sorted(recipes.items())),
        "commands": dict(sorted(commands.items())),
        "features": dict(sorted(features.items())),
        "bundles": bundles,
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"


def _name(requirement: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else " " for letter in requirement).split()[0]
