"""The demos that plugins ship. A demo is a series of recipes that starts without a model.

A plugin's package may hold `demos.toml`, with a table for each demo:

    [sums]
    about = "a small model learns to add"
    demonstrations = "my_plugin.sums:demonstrations"   # called with (count, seed=seed): records of conversations
    folder = "runs/sums"                               # where its recipes look for its model and write their runs
    recipes = ["sums-sft", "sums-grpo"]                # in this order
    minutes = 5                                        # its duration on two CPU cores
    layers = 3                                         # of the model; 4 where it is left out

The model and the data from which a demo starts are written to `start` below its folder.
"""

import re
import tomllib

from attrs import fields, frozen

from whet.config.messages import choice_words
from whet.errors import ConfigError, PluginError
from whet.plugins.registry import Registry
from whet_start.recipes import packages

OPTIONAL = "layers"
"""The key of a demo's table that may be left out."""


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
    layers: int = 4
    """Layers of its model."""


def demos(registry: Registry) -> dict[str, Demo]:
    """Return the demos of all installed plugins by name. Raises `PluginError` for a malformed table."""
    found: dict[str, Demo] = {}
    for folder, distribution, _ in packages(registry):
        file = folder / "demos.toml"
        for name, table in (tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}).items():
            wanted = {field.name for field in fields(Demo)} - {"name", "distribution", OPTIONAL}
            if wrong := wanted ^ (set(table) - {OPTIONAL}):
                keys = f"must have the keys {', '.join(sorted(wanted))}, and may have {OPTIONAL}"
                raise PluginError(f"{file}: [{name}] {keys}; see: {', '.join(sorted(wrong))}")
            found[name] = Demo(**{**table, "recipes": tuple(table["recipes"])}, name=name, distribution=distribution)
    return dict(sorted(found.items()))


def demo(registry: Registry, name: str) -> Demo:
    """Return a demo. Raises `ConfigError` with the nearest name."""
    found = demos(registry)
    if name in found:
        return found[name]
    raise ConfigError(f"there is no demo {name!r:.80}{choice_words(name, found)}")


def rebased(text: str, old: str, new: str) -> str:
    """Replace the folder at the beginning of a recipe's plain paths; quote a path that YAML would misread."""
    plain = re.fullmatch(r"[\w./-]+", new) is not None

    def path(match: re.Match[str]) -> str:
        whole = f"{new}{match[1]}"
        return whole if plain else "'" + whole.replace("'", "''") + "'"

    return re.sub(rf"(?<![\w./-]){re.escape(old)}((?:/[\w.-]+)*)(?![\w/-])", path, text)
