"""Decides from the table of roles which roles take turns in memory. `whet.run.colocation` takes the turns."""

from collections.abc import Iterator, Sequence

from whet.component import Problem
from whet.plan.roles import Roles

KEY = "cluster.offload"
_NEVER_AWAKE = "endpoint.serve is on, and an algorithm without rollouts hardly ever wakes the generator to answer"


def find_turns(
    offload: str, max_staleness: int, serves: bool, roles: Roles
) -> tuple[tuple[tuple[str, ...], ...], list[str], list[Problem]]:
    """Return the roles that take turns, in training and in generation, with notes and problems.

    The arguments are `cluster.offload`, `rollout.max_staleness` and `endpoint.serve`. A reason against turns is a
    problem if `offload` is `always`, else a note.
    """
    always, generates = offload == "always", "generator" in roles.names
    if offload == "never" or (not always and (max_staleness or not generates)):
        return (), [], []
    if not generates:
        return (), [], [Problem(KEY, "is always, and there is no generator to take turns with; remove it")]
    sides = _sides(roles)
    if not always:
        sharing = {role for group in roles.groups for role in _sharing(roles, group, sides)}
        sides = tuple(tuple(role for role in side if role in sharing) for side in sides)
    problems = list[Problem]()
    if always and max_staleness:
        words = f"with rollout.max_staleness {max_staleness} the generator works while the backend trains"
        change = "set rollout.max_staleness: 0, or cluster.offload: auto"
        problems.append(Problem(KEY, f"is always, but {words}; {change}"))
    never_awake = serves and "rollouts" not in roles.algorithm.inputs
    unable = list(_unable(roles, [role for side in sides for role in side]))
    if always and never_awake:
        change = "remove endpoint.serve, or set cluster.offload: auto"
        problems.append(Problem(KEY, f"is always, but {_NEVER_AWAKE}; {change}"))
    if always:
        problems += [Problem(KEY, f"is always, but {words}; set cluster.offload: auto") for words in unable]
    if problems or not all(sides):
        return (), [], problems
    if reasons := [_NEVER_AWAKE] if never_awake else unable:
        return (), [f"all keep their memory while others work: {'; '.join(reasons)}"], []
    note = "endpoint.serve: who asks while the backend trains waits until the generator is awake again"
    return sides, [note] if serves else [], []


def _sides(roles: Roles) -> tuple[tuple[str, ...], ...]:
    """Return the roles that work only in training, and the roles that work only in generation."""
    training = {"backend", *roles.algorithm.roles}
    generation = {"generator", *roles.asked_by("")}
    names = roles.names
    return tuple(name for name in names if name in training - generation), tuple(
        name for name in names if name in generation - training
    )


def _sharing(roles: Roles, group: Sequence[str], sides: Sequence[Sequence[str]]) -> list[str]:
    """Return the roles of a group of processes that share its GPUs, if both sides have such roles."""
    on_gpus = [role for role in group if roles[role].gpus]
    return on_gpus if all(any(role in side for role in on_gpus) for side in sides) else []


def _unable(roles: Roles, names: Sequence[str]) -> Iterator[str]:
    for role in map(roles.__getitem__, names):
        device, can = "cuda" if role.gpus else "cpu", role.facts.sleeps
        if device not in can:
            which = f"{role.selection.name} of the {role.name}"
            where = f"on {' and '.join(can)} alone, and runs on {device}" if can else "nowhere"
            yield f"{which} can give memory back {where}"
