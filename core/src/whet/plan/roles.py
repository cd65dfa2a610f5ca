"""The roles of a run: backend, generator and further models. One table, made once, after facts are gathered.

config + facts  ->  Roles: by name a Role(path, selection, facts, ranks, gpus, trained, group)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
from attrs import field, frozen

from whet.component import (
    AlgorithmFacts,
    BackendFacts,
    EnvironmentFacts,
    Facts,
    GeneratorFacts,
    RoleNeed,
    Selection,
    WorkerFacts,
)  # fmt: skip
from whet.config.cluster import ClusterSection
from whet.config.sections import Config

Of = TypeVar("Of", bound=Facts)
_PLAIN = frozenset((str, int, float, bool, type(None)))


@frozen
class Role:
    """One role of a run."""

    name: str
    path: str
    """Where its component stands in the config."""
    selection: Selection
    """Its component."""
    facts: WorkerFacts
    """The facts of its component."""
    ranks: int
    """The number of ranks in the config, or else as many as its GPUs allow, or else as its component wants."""
    gpus: int
    """The number of GPUs of all its ranks."""
    trained: bool
    """Whether it is trained: the backend is, and further models that a component wants trained."""
    group: tuple[str, ...]
    """Names of the roles that share its devices and take turns, this one included."""
    process: tuple[int, str]
    """The GPUs of each rank (on a CPU: 1), and the Python. Roles of one group share processes if these are equal."""
    sync_every: int = 0
    """Steps from one weight sync to the next; 0: its weights do not change."""

    @property
    def generates(self) -> bool:
        """Return whether its component is a generator."""
        return isinstance(self.facts, GeneratorFacts)


@frozen
class Roles:
    """The roles of a run, in order: backend, generator, further models."""

    facts: Mapping[str, Facts]
    """The facts of every chosen component, by path into the config."""
    by_name: Mapping[str, Role]
    needs: Mapping[str, RoleNeed]
    """The needs of each further model, whether there is such a role or not."""
    sharing: tuple[tuple[str, ...], ...]
    """Groups of roles that are to share devices, the default filled in."""
    known: tuple[str, ...]
    """Names that the keys of `cluster` may hold; the generator's is one where there is none, too."""
    selections: Mapping[str, Selection] = field(factory=dict)
    """Every chosen component, by path into the config."""

    def __getitem__(self, name: str) -> Role:
        return self.by_name[name]

    def __iter__(self) -> Iterator[Role]:
        return iter(self.by_name.values())

    @property
    def algorithm(self) -> AlgorithmFacts:
        """Return the facts of the algorithm."""
        return self.of(AlgorithmFacts)["algorithm"]

    @property
    def backend(self) -> BackendFacts:
        """Return the facts of the backend."""
        return self.of(BackendFacts)["backend"]

    def of(self, kind: type[Of]) -> dict[str, Of]:
        """Return the facts of one kind, by path into the config."""
        return {path: found for path, found in self.facts.items() if isinstance(found, kind)}

    def outputs_of(self, name: str) -> frozenset[str]:
        """Return the model outputs that a role can compute: a generator computes none for others."""
        facts = self[name].facts
        return facts.outputs_given if isinstance(facts, BackendFacts) else frozenset()

    @property
    def extras(self) -> frozenset[str]:
        """Return the optional parts of requests that the generator supports; see `GeneratorFacts`."""
        facts = self.facts.get("generator")
        return facts.extras if isinstance(facts, GeneratorFacts) else frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all roles."""
        return tuple(self.by_name)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the roles of each group of devices, in order of its first; a role alone is a group, too."""
        return tuple(dict.fromkeys(role.group for role in self))

    def asked_by(self, section: str) -> list[str]:
        """Return the further models that the environments below a path into the config ask."""
        asking = [found for path, found in self.of(EnvironmentFacts).items() if path.startswith(section)]
        return list(dict.fromkeys(name for found in asking for name in found.roles))

    def in_process(self, name: str) -> tuple[str, ...]:
        """Return the roles that share the processes of a role, this one included."""
        role = self[name]
        return tuple(other for other in role.group if self[other].process == role.process)


def selections(value: Any, path: str = "") -> Iterator[tuple[str, Selection]]:
    """Walk all components chosen anywhere in a config, with their paths."""
    if isinstance(value, Selection):
        yield path, value
        yield from selections(value.config, path)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from selections(item, f"{path}.{i}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from selections(item, f"{path}.{key}")
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            if type(item := getattr(value, field.name)) in _PLAIN:
                continue
            inline = field.metadata.get("inline")
            yield from selections(item, path if inline else f"{path}.{field.name}".lstrip("."))


def make_roles(config: Config, facts: Mapping[str, Facts]) -> Roles:
    """Return the table of roles. `facts` are by path into the config."""
    cluster, needs = config.cluster, _needs(facts)
    holding = [name for name, role in config.roles.items() if role.component.kind == "backends"]
    sharing = _sharing(cluster, holding, bool(config.rollout.max_staleness))
    generator = ["generator"] if config.generator is not None else []
    names = list(dict.fromkeys(["backend", *generator, *config.roles]))
    roles = {}
    for name in names:
        path = name if name in ("backend", "generator") else f"roles.{name}"
        selection = config.roles[name].component if name in config.roles else getattr(config, name)
        assert isinstance(selection, Selection)
        found, gpus = facts[path], cluster.gpus.get(name, 0)
        assert isinstance(found, WorkerFacts)
        ranks = cluster.ranks.get(name, gpus // found.processes or found.ranks)
        trained = name == "backend" or needs.get(name, RoleNeed()).trained
        shared = next((group for group in sharing if name in group), (name,))
        group = tuple(role for role in shared if role in names)
        every = config.roles[name].sync_every if name in config.roles else int(name == "generator")
        process = (found.processes if gpus else 1, cluster.python.get(name, ""))
        roles[name] = Role(name, path, selection, found, ranks, gpus, trained, group, process, every)
    known = tuple(dict.fromkeys(["backend", "generator", *config.roles]))
    return Roles(facts, roles, needs, sharing, known, dict(selections(config)))


def _needs(facts: Mapping[str, Facts]) -> dict[str, RoleNeed]:
    """Return the needs of each further model, of all components that ask for it together."""
    needs: dict[str, RoleNeed] = {}
    asking = [found for found in facts.values() if isinstance(found, AlgorithmFacts | EnvironmentFacts)]
    for found in asking:
        for name, need in found.roles.items():
            before = needs.get(name, RoleNeed())
            needs[name] = RoleNeed(
                before.outputs | need.outputs,
                before.trained or need.trained,
                before.conversations or need.conversations,
                before.generates or need.generates,
            )
    return needs


def _sharing(cluster: ClusterSection, further: Sequence[str], overlaps: bool) -> tuple[tuple[str, ...], ...]:
    """Return the groups of `cluster.colocate`; by default roles of one Python, without generators that work ahead."""
    if cluster.colocate is not None:
        return tuple(map(tuple, cluster.colocate))
    together = ["backend", *further] if overlaps else ["backend", "generator", *further]
    pythons = dict.fromkeys(cluster.python.get(role, "") for role in together)
    parts = [tuple(role for role in together if cluster.python.get(role, "") == python) for python in pythons]
    return tuple(part for part in parts if len(part) > 1)
