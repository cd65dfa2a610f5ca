"""The roles of a run: backend, generator and further models; which share processes, and what is wanted of them."""

from collections.abc import Iterator, Mapping

from whet.component import Facts, Problem, RoleNeed, Selection
from whet.config.sections import Config


def shares(config: Config, one: str, other: str) -> bool:
    """Whether two roles share their processes."""
    return any(one in group and other in group for group in share_groups(config))


def share_groups(config: Config) -> list[list[str]]:
    """Groups of roles that share processes, the default filled in."""
    if config.cluster.colocate is not None:
        return config.cluster.colocate
    together = ["backend", *config.roles] if config.rollout.max_staleness else ["backend", "generator", *config.roles]
    pythons = dict.fromkeys(config.cluster.python.get(role, "") for role in together)
    parts = [[role for role in together if config.cluster.python.get(role, "") == python] for python in pythons]
    return [part for part in parts if len(part) > 1]


def groups(config: Config) -> list[list[str]]:
    """Give the roles of each group of processes, in order of its first; a role alone is a group, too."""
    found: list[list[str]] = []
    roles = role_names(config)
    for role in roles:
        sharing = next((group for group in share_groups(config) if role in group), [role])
        group = [other for other in sharing if other in roles]
        if group not in found:
            found.append(group)
    return found


def role_names(config: Config) -> list[str]:
    """Give all roles of a run."""
    return ["backend", *(["generator"] if config.generator is not None else []), *config.roles]


def role_path(name: str) -> str:
    """Give the path into the config at which a role's component stands."""
    return name if name in ("backend", "generator") else f"roles.{name}"


def role_selection(config: Config, name: str) -> Selection:
    """Give the component of a role."""
    chosen = config.roles[name].component if name in config.roles else getattr(config, name)
    assert isinstance(chosen, Selection)
    return chosen


def needed_roles(facts: Mapping[str, Facts]) -> dict[str, RoleNeed]:
    """Give what is wanted of each further model, by whoever asks for it."""
    needs: dict[str, RoleNeed] = {}
    for found in facts.values():
        for name, need in found.roles.items():
            before = needs.get(name, RoleNeed())
            needs[name] = RoleNeed(
                before.outputs | need.outputs,
                before.trained or need.trained,
                before.conversations or need.conversations,
            )
    return needs


def is_trained(facts: Mapping[str, Facts], name: str) -> bool:
    """Return whether a role is trained: the backend is, and further models that a component wants trained."""
    return name == "backend" or needed_roles(facts).get(name, RoleNeed()).trained


def known_roles(config: Config) -> list[str]:
    """Give the names that the keys of `cluster` may hold; the generator's is one where there is none, too."""
    return list(dict.fromkeys(["backend", "generator", *config.roles]))


def python_problems(config: Config) -> Iterator[Problem]:
    """Match the Python environments of roles with where these live; what is in them is looked at later."""
    python, known = config.cluster.python, known_roles(config)
    for role in python:
        if role not in known:
            yield Problem(f"cluster.python.{role}", f"there is no such role; there are {', '.join(known)}")
        elif config.cluster.workers == "inline":
            yield Problem(
                f"cluster.python.{role}",
                "inline workers live in the driver, and in its Python; remove this, or choose cluster.workers: process",
            )
    for i, group in enumerate(config.cluster.colocate or []):
        found = {role: python.get(role, "") for role in group}
        if len(set(found.values())) > 1:
            listed = " and ".join(
                f"{role} in {one!r}" if one else f"{role} in the driver's" for role, one in found.items()
            )
            yield Problem(
                f"cluster.colocate.{i}",
                f"has roles of different Pythons, which no process can be in at one time: {listed}; set them apart, or "
                "change cluster.python",
            )
