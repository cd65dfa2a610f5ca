"""Which algorithms, losses, advantages and filters go together: asked of the plan, for every pair of them.

for one in combinations(registry):
reasons(one, base, registry)      empty where it fits, else what `whet check` says
covering(fitting)                     a few of those in which every pair that fits occurs
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
from attrs import frozen

from whet.component import Kind
from whet.config.sections import Config
from whet.config.structure import structure
from whet.errors import ConfigError
from whet.plan.placement import Machine
from whet.plan.plan import gather_facts, make_plan
from whet.plan.roles import make_roles
from whet.plugins.registry import Registry
from whet_testing.contracts.component import MODEL

SLOTS: Mapping[str, Kind] = {
    "loss": "losses", "advantages": "advantages", "filters": "filters", "value_loss": "losses",
}  # fmt: skip
"""Keys of an algorithm's section under which parts are chosen, with their kinds."""


@frozen
class Combination:
    """An algorithm with its parts by name; empty: it has no such part, it is the default one, or no filter."""

    algorithm: str
    loss: str = ""
    advantages: str = ""
    filters: str = ""
    value_loss: str = ""

    def section(self) -> dict[str, Any]:
        """Give the section `algorithm`."""
        chosen = {"loss": self.loss, "advantages": self.advantages, "value_loss": self.value_loss}
        named = {slot: name for slot, name in chosen.items() if name}
        return {"use": self.algorithm, **named, **({"filters": [self.filters]} if self.filters else {})}

    def parts(self) -> list[tuple[str, str]]:
        """Give (slot, name) of each part, a filter that is not chosen included."""
        whole: dict[str, str] = attrs.asdict(self)
        return [(slot, name) for slot, name in whole.items() if name or slot == "filters"]

    def pairs(self) -> set[Any]:
        """Give every two parts of it."""
        return set(itertools.combinations(self.parts(), 2))


def combinations(registry: Registry, algorithms: Iterable[str] = ()) -> Iterator[Combination]:
    """Give every choice of parts for each algorithm, or for some of them, in order of name."""
    for name, offer in sorted(registry.offers("algorithms").items()):
        if algorithms and name not in algorithms:
            continue
        keys = [field.alias for field in attrs.fields(offer.component.config)]
        choices = {slot: sorted(registry.offers(kind)) for slot, kind in SLOTS.items() if slot in keys}
        if "filters" in choices:
            choices["filters"] = ["", *choices["filters"]]
        for chosen in itertools.product(*choices.values()):
            yield Combination(name, **dict(zip(choices, chosen, strict=True)))


def reasons(one: Combination, base: Mapping[str, Any], registry: Registry, **algorithm: Any) -> list[str]:
    """Say what `whet check` finds wrong with a combination. `base` is the rest of the config, `algorithm` further keys.

    Of its sections `environments` and `data` the one that the algorithm does not feed on is left out.
    """
    document = {**base, "algorithm": {**one.section(), **algorithm}}
    try:
        config = structure(document, Config, registry)
    except ConfigError as error:
        return list(error.problems)
    facts = gather_facts(config, MODEL)
    fed = "rollouts" in facts["algorithm"].inputs
    config = attrs.evolve(config, data=None) if fed else attrs.evolve(config, environments=[])
    _, problems = make_plan(config, MODEL, make_roles(config, facts), Machine(cores=8))
    return [str(problem) for problem in (*registry.problems(config), *problems)]


def covering(fitting: Iterable[Combination]) -> list[Combination]:
    """Choose combinations in which every pair of parts of the given ones occurs, by always taking the newest."""
    left = list(fitting)
    missing: set[Any] = set().union(*(one.pairs() for one in left))
    chosen = []
    while missing:
        best = max(left, key=lambda one: len(one.pairs() & missing))
        chosen.append(best)
        missing -= best.pairs()
    return chosen
