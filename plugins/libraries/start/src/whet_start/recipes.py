"""The recipes that plugins ship: YAML files in the folder `recipes` of their packages."""

import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from attrs import frozen

from whet.config.messages import choice_words
from whet.errors import ConfigError
from whet.plugins.catalog import catalog, install_words
from whet.plugins.registry import Registry


@frozen
class Recipe:
    """A recipe in an installed package."""

    name: str
    path: Path
    distribution: str
    version: str

    @property
    def about(self) -> str:
        """Return the first sentence of the comment at the top of the recipe."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        head = itertools.takewhile(lambda line: line.startswith("#"), lines)
        words = " ".join(line.lstrip("# ") for line in head)
        return re.split(r"(?<=[.;]) ", words)[0].rstrip(".;")


def packages(registry: Registry) -> Iterator[tuple[Path, str, str]]:
    """Yield the folder of each installed plugin's package, with the distribution and its version."""
    for source in registry.sources:
        if source.module:  # a single file has no folder of its own
            module = importlib.import_module(source.module.partition(".")[0])
            if module.__file__ and hasattr(module, "__path__"):
                yield Path(module.__file__).parent, source.distribution, source.version


def recipes(registry: Registry) -> dict[str, Recipe]:
    """Return the recipes of all installed plugins by name. A base recipe may be shipped by several plugins."""
    found: dict[str, Recipe] = {}
    for folder, distribution, version in packages(registry):
        for path in sorted(folder.glob("recipes/*.yaml")):
            if path.stem not in found or catalog().recipes.get(path.stem) == distribution:
                found[path.stem] = Recipe(path.stem, path, distribution, version)
    return dict(sorted(found.items(), key=lambda item: (item[1].distribution, item[0])))


def recipe(registry: Registry, name: str) -> Recipe:
    """Return a recipe. Raises `ConfigError` with the distribution that ships it, or with the nearest name."""
    found = recipes(registry)
    if name in found:
        return found[name]
    if (owner := catalog().recipes.get(name)) is not None:
        raise ConfigError(f"the recipe {name!r} comes with {owner}: {install_words([owner])}")
    raise ConfigError(f"there is no recipe {name!r:.80}{choice_words(name, {**found, **catalog().recipes})}")


def with_bases(recipe: Recipe) -> list[Path]:
    """Return the file of a recipe and the files that it extends. Raises `ConfigError` if one of them is missing."""
    files = [recipe.path]
    while (base := yaml.safe_load(files[-1].read_text(encoding="utf-8")).get("extends")) is not None:
        file = files[-1].parent / base
        if not file.is_file():
            raise ConfigError(f"{recipe.distribution} ships {recipe.name!r} without {base}, which it extends")
        files.append(file)
    return files
