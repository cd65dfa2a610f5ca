"""What the project's own distributions offer. For a name that is not installed, it tells which distribution to install.

Core knows no plugin by name. All of it is read from `catalog.json`, which `python docs/generate_reference.py` writes
from the plugins' own data.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import frozen

from whet.config.messages import nearest

FILE = Path(__file__).with_name("catalog.json")


@frozen
class Catalog:
    """The project's distributions beside core."""

    distributions: Mapping[str, str]
    """One line about each distribution, by name."""
    components: Mapping[str, Mapping[str, str]]
    """For each kind of component, the distribution that offers it, by the word after `use:`."""
    recipes: Mapping[str, str]
    """The distribution that ships a recipe, by the name of the recipe."""
    commands: Mapping[str, str]
    """The distribution that offers a command of `whet`, by the command."""
    features: Mapping[str, str]
    """The distribution that brings a feature that is no component, by the word for it, e.g. `endpoint`."""
    bundles: Mapping[str, tuple[str, ...]]
    """Distributions that are installed together, by the extra of core that names them."""

    def owner(self, kind: str, name: str) -> str | None:
        """Return the distribution that offers a component. None: the catalog has no such component."""
        return self.components.get(kind, {}).get(name)

    def near(self, kind: str, name: str) -> str | None:
        """Return the component of a kind that was probably meant. None: no name is close."""
        return nearest(name, self.components.get(kind, {}))

    def bundle(self, wanted: Iterable[str]) -> str | None:
        """Return the smallest bundle that holds all of these distributions, or None.

        It may hold at most one other distribution that offers no command.
        """
        needed, known = set(wanted), set(wanted) | set(self.commands.values())
        holding = [name for name, held in self.bundles.items() if needed <= set(held) and len(set(held) - known) <= 1]
        return min(holding, key=lambda name: len(self.bundles[name]), default=None)

    def command(self, wanted: Iterable[str]) -> str:
        """Return the shortest command that installs these distributions."""
        bundle = self.bundle(needed := list(wanted))
        return bundle_words(bundle) if bundle else install_words(needed)


@functools.cache
def catalog() -> Catalog:
    """Return the catalog. It is read once."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    bundles = {name: tuple(held) for name, held in found["bundles"].items()}
    return Catalog(**{**found, "bundles": bundles})


def install_words(distributions: Iterable[str]) -> str:
    """Return the command that installs distributions, e.g. `pip install whet-one whet-two`."""
    return " ".join(["pip install", *dict.fromkeys(distributions)])


def bundle_words(name: str) -> str:
    """Return the command that installs a bundle. The quotes are for shells that expand brackets."""
    return f"pip install 'whet[{name}]'"


def offered_words(owner: str) -> str:
    """Return which distribution offers a name that is not installed, and the command to install it, as text."""
    return f"it is offered by {owner}: {install_words([owner])}"
