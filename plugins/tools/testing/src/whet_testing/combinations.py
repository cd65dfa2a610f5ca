"""Find the algorithms, losses, advantages and filters that fit together. The plan decides.

- `combinations(registry)`: every choice of parts
- `reasons(one, base, registry)`: the problems that `whet check` reports; empty where the parts fit
- `facts_of(one, registry)`, `asked_roles(facts, like)`: what its algorithm asks for besides
- `covering(fitting)`: a few combinations in which every fitting pair of parts occurs
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import attrs
from attrs import frozen

from whet.component import AlgorithmFacts, Kind, resolve
from whet.config.sections import Config
from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError
from whet.plan.placement import Machine
from whet.plan.plan import gather_facts, make_plan
from whet.plan.roles import make_roles
from whet.plugins.registry import Registry
from whet_testing.contracts.component import MODEL


class Paired(Protocol):
    """Choices that are made together, two by two."""

    def pairs(self) -> set[Any]:
        """Return every pair of two choices."""


T = TypeVar("T", bound=Paired)
SLOTS: Mapping[str, Kind] = {
    "loss": "losses", "advantages": "advantages", "filters": "filters", "value_loss": "losses",
}  # fmt: skip
"""Keys of the section `algorithm` that choose a part, each with the kind of the part."""


@frozen
class Combination:
    """An algorithm and the names of its parts.

    An empty name means that the algorithm has no such part or uses the default one; for `filters`, no filter.
    """

    algorithm: str
    loss: str = ""
    advantages: str = ""
    filters: str = ""
    value_loss: str = ""

    def section(self) -> dict[str, Any]:
        """Return the section `algorithm` of a config."""
        chosen = {"loss": self.loss, "advantages": self.advantages, "value_loss": self.value_loss}
        named = {slot: name for slot, name in chosen.items() if name}
        return {"use": self.algorithm, **named, **({"filters": [self.filters]} if self.filters else {})}

    def parts(self) -> list[tuple[str, str]]:
        """Return (slot, name) of each chosen part. The slot `filters` is included even when no filter is chosen."""
        whole: dict[str, str] = attrs.asdict(self)
        return [(slot, name) for slot, name in whole.items() if name or slot == "filters"]

    def pairs(self) -> set[Any]:
        """Return every pair of two parts."""
        return set(itertools.combinations(self.parts(), 2))


def combinations(registry: Registry, algorithms: Iterable[str] = ()) -> Iterator[Combination]:
    """Yield every choice of parts for each algorithm, in order of name. `algorithms` restricts them by name."""
    for name, offer in sorted(registry.offers("algorithms").items()):
        if algorithms and name not in algorithms:
            continue
        keys = [field.alias for field in attrs.fields(offer.component.config)]
        choices = {slot: sorted(registry.offers(kind)) for slot, kind in SLOTS.items() if slot in keys}
        if "filters" in choices:
            choices["filters"] = ["", *choices["filters"]]
        for chosen in itertools.product(*choices.values()):
            yield Combination(name, **dict(zip(choices, chosen, strict=True)))


def reasons(
    one: Combination, base: Mapping[str, Any], registry: Registry, model: ModelInfo = MODEL, **algorithm: Any
) -> list[str]:
    """Return the problems that `whet check` reports for a combination with a model.

    `base` holds the other sections of the config, `algorithm` further keys of the section `algorithm`. An algorithm
    reads either rollouts or data, so the section that it does not read (`environments` or `data`) is left out.
    """
    document = {**base, "algorithm": {**one.section(), **algorithm}}
    try:
        config = structure(document, Config, registry)
    except ConfigError as error:
        return list(error.problems)
    facts = gather_facts(config, model)
    fed = "rollouts" in make_roles(config, facts).algorithm.inputs
    config = attrs.evolve(config, data=None) if fed else attrs.evolve(config, environments=[])
    _, problems = make_plan(config, model, make_roles(config, facts), Machine(cores=8))
    return [str(problem) for problem in (*registry.problems(config), *problems)]


def facts_of(one: Combination, registry: Registry, model: ModelInfo = MODEL) -> AlgorithmFacts:
    """Return the facts of the algorithm of a combination. All other keys have their defaults."""
    component = registry.find("algorithms", one.algorithm).component
    keys = {key: value for key, value in one.section().items() if key != "use"}
    found = resolve(component.facts)(structure(keys, component.config, registry), model)
    assert isinstance(found, AlgorithmFacts)
    return found


def asked_roles(facts: AlgorithmFacts, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `roles` of a config: the models that an algorithm asks for, each with the keys of `like`."""
    heads = {name: {"head": "value"} if "values" in need.outputs else {} for name, need in facts.roles.items()}
    return {name: {**like, **head} for name, head in heads.items()}


def covering(fitting: Iterable[T]) -> list[T]:
    """Return a few of the given combinations in which every pair of the given ones occurs.

    The choice is greedy: each combination taken adds the most pairs that are still missing.
    """
    left = list(fitting)
    missing: set[Any] = set().union(*(one.pairs() for one in left))
    chosen = []
    while missing:
        best = max(left, key=lambda one: len(one.pairs() & missing))
        chosen.append(best)
        missing -= best.pairs()
    return chosen
