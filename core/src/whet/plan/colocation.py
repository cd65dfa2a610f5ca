"""Who takes turns in memory: pure, from config and facts. `whet.run.colocation` does it in a run."""

from collections.abc import Iterator, Sequence

from whet.component import Problem
from whet.config.sections import Config
from whet.plan.roles import Roles

KEY = "cluster.offload"
_NEVER_AWAKE = "endpoint.serve is on, and an algorithm without rollouts hardly ever wakes the generator to answer"


def sleep_problems(config: Config, roles: Roles) -> Iterator[Problem]:
    """Find the reasons why no roles can take turns although the config asks for it."""
    if config.cluster.offload != "always":
        return
    if config.generator is None:
        yield Problem(KEY, "is always, and there is no generator to take turns with; remove it")
        return
    if config.rollout.max_staleness:
        yield Problem(
            KEY,
            f"is always, but with rollout.max_staleness {config.rollout.max_staleness} the generator works while the "
            "backend trains; set rollout.max_staleness: 0, or cluster.offload: auto",
        )
    if _never_awake(config, roles):
        yield Problem(KEY, f"is always, but {_NEVER_AWAKE}; remove endpoint.serve, or set cluster.offload: auto")
    for words in _unable(roles, [role for side in _sides(roles) for role in side]):
        yield Problem(KEY, f"is always, but {words}; set cluster.offload: auto")


def turns_and_notes(
    config: Config, roles: Roles
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:  # fmt: skip
    """Return the roles that take turns, those that train and those that generate, and notes on it."""
    chosen = _chosen(config, roles)
    if not chosen:
        return (), []
    if _never_awake(config, roles):
        return (), [f"all keep their memory while others work: {_NEVER_AWAKE}"]
    if unable := list(_unable(roles, [role for side in chosen for role in side])):
        return (), [f"all keep their memory while others work: {'; '.join(unable)}"]
    note = "endpoint.serve: who asks while the backend trains waits until the generator is awake again"
    return chosen, [note] if config.endpoint.serve else []


def _never_awake(config: Config, roles: Roles) -> bool:
    return config.endpoint.serve and "rollouts" not in roles.algorithm.inputs


def _chosen(config: Config, roles: Roles) -> tuple[tuple[str, ...], ...]:
    """Return the roles that should take turns."""
    wanted = config.cluster.offload
    if wanted == "never" or config.generator is None or config.rollout.max_staleness:
        return ()
    sides = _sides(roles)
    if wanted == "auto":
        sharing = {role for group in roles.groups for role in _sharing(roles, group, sides)}
        sides = tuple(tuple(role for role in side if role in sharing) for side in sides)
    return sides if all(sides) else ()


def _sides(roles: Roles) -> tuple[tuple[str, ...], ...]:
    """Return the roles that work while the policy is trained alone, and those while it generates alone."""
    training = {"backend", *roles.algorithm.roles}
    generation = {"generator", *roles.asked_by("")}
    names = roles.names
    return tuple(name for name in names if name in training - generation), tuple(
        name for name in names if name in generation - training
    )


def _sharing(roles: Roles, group: Sequence[str], sides: Sequence[Sequence[str]]) -> list[str]:
    """Return the roles of a group of processes that share its GPUs, where there are some of either side."""
    on_gpus = [role for role in group if roles[role].gpus]
    return on_gpus if all(any(role in side for role in on_gpus) for side in sides) else []


def _unable(roles: Roles, names: Sequence[str]) -> Iterator[str]:
    for role in map(roles.__getitem__, names):
        device, can = "cuda" if role.gpus else "cpu", role.facts.sleeps
        if device not in can:
            which = f"{role.selection.name} of the {role.name}"
            where = f"on {' and '.join(can)} alone, and runs on {device}" if can else "nowhere"
            yield f"{which} can give memory back {where}"
