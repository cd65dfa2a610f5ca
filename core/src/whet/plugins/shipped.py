"""What plugins ship beside code: recipes, and demos. A demo is a series of recipes that starts without a model.

A plugin's package may hold the folder `recipes`, with a YAML file for each, and `demos.toml`, with a table for each:

    [sums]
    about = "a small model learns to add"
    demonstrations = "my_plugin.sums:demonstrations"   # called with (count, seed=seed): records of conversations
    folder = "runs/sums"                               # where its recipes look for its model and write their runs
    recipes = ["sums-sft", "sums-grpo"]                # in this order
    minutes = 5                                        # its duration on two CPU cores

The model and the data from which a demo starts are written to `start` below its folder.
"""

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml
from attrs import fields, frozen

from whet.config.messages import choice_words
from whet.errors import ConfigError, PluginError
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
        words = " ".join(line.lstrip("# ") for line in _head(lines))
        return re.split(r"(?<=[.;]) ", words)[0].rstrip(".;")


@frozen
class Demo:
    """A series of small runs that starts without a model."""

    name: str
    about: str
    demonstrations: str
    """`package.module:function`, called with (count, seed=seed); yields records `{"messages": [...]}`."""
    folder: str
    """The folder that its recipes name."""
    recipes: tuple[str, ...]
    minutes: float
    """Its duration on two CPU cores."""
    distribution: str


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


def demos(registry: Registry) -> dict[str, Demo]:
    """Return the demos of all installed plugins by name. Raises `PluginError` for a malformed table."""
    found: dict[str, Demo] = {}
    for folder, distribution, _ in packages(registry):
        file = folder / "demos.toml"
        for name, table in (tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}).items():
            wanted = {field.name for field in fields(Demo)} - {"name", "distribution"}
            if set(table) != wanted:
                wrong = ", ".join(sorted(wanted ^ set(table)))
                raise PluginError(f"{file}: [{name}] must have the keys {', '.join(sorted(wanted))}; see: {wrong}")
            found[name] = Demo(**{**table, "recipes": tuple(table["recipes"])}, name=name, distribution=distribution)
    return found


def demo(registry: Registry, name: str) -> Demo:
    """Return a demo. Raises `ConfigError` with the distribution that ships it, or with the nearest name."""
    found = demos(registry)
    if name in found:
        return found[name]
    if (needed := catalog().demos.get(name)) is not None:
        command = catalog().command(needed)
        raise ConfigError(f"the demo {name!r} comes with {needed[0]}; all that it needs: {command}")
    raise ConfigError(f"there is no demo {name!r:.80}{choice_words(name, {**found, **catalog().demos})}")


def with_bases(recipe: Recipe) -> list[Path]:
    """Return the file of a recipe and the files that it extends. Raises `ConfigError` if one of them is missing."""
    files = [recipe.path]
    while (base := yaml.safe_load(files[-1].read_text(encoding="utf-8")).get("extends")) is not None:
        file = files[-1].parent / base
        if not file.is_file():
            raise ConfigError(f"{recipe.distribution} ships {recipe.name!r} without {base}, which it extends")
        files.append(file)
    return files


def rebased(text: str, old: str, new: str) -> str:
    """Replace the folder at the beginning of a recipe's plain paths; quote a path that YAML would misread."""
    plain = re.fullmatch(r"[\w./-]+", new) is not None

    def path(match: re.Match[str]) -> str:
        whole = f"{new}{match[1]}"
        return whole if plain else "'" + whole.replace("'", "''") + "'"

    return re.sub(rf"(?<![\w./-]){re.escape(old)}((?:/[\w.-]+)*)(?![\w/-])", path, text)


def _head(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield line
