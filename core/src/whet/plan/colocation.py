"""Who takes turns in memory: pure, from config and facts. `whet.run.colocation` does it in a run."""

from collections.abc import Iterator, Mapping, Sequence

from whet.component import Facts, Problem
from whet.config.sections import Config
from whet.plan.roles import groups, role_names, role_path, role_selection

KEY = "cluster.offload"
_NEVER_AWAKE = "endpoint.serve is on, and an algorithm without rollouts hardly ever wakes the generator to answer"


def sleep_problems(config: Config, facts: Mapping[str, Facts]) -> Iterator[Problem]:
    """Find out why nobody can take turns although it is asked for."""
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
    if _never_awake(config, facts):
        yield Problem(KEY, f"is always, but {_NEVER_AWAKE}; remove endpoint.serve, or set cluster.offload: auto")
    for words in _unable(config, facts, [role for side in _sides(config, facts) for role in side]):
        yield Problem(KEY, f"is always, but {words}; set cluster.offload: auto")


def turns_and_notes(
    config: Config, facts: Mapping[str, Facts]
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:  # fmt: skip
    """Give the roles that take turns, those that train and those that generate, and what is to be said of it."""
    chosen = _chosen(config, facts)
    if not chosen:
        return (), []
    if _never_awake(config, facts):
        return (), [f"all keep their memory while others work: {_NEVER_AWAKE}"]
    if unable := list(_unable(config, facts, [role for side in chosen for role in side])):
        return (), [f"all keep their memory while others work: {'; '.join(unable)}"]
    note = "endpoint.serve: who asks while the backend trains waits until the generator is awake again"
    return chosen, [note] if config.endpoint.serve else []


def _never_awake(config: Config, facts: Mapping[str, Facts]) -> bool:
    return config.endpoint.serve and "rollouts" not in facts["algorithm"].inputs


def _chosen(config: Config, facts: Mapping[str, Facts]) -> tuple[tuple[str, ...], ...]:
    """Give those that should take turns."""
    wanted = config.cluster.offload
    if wanted == "never" or config.generator is None or config.rollout.max_staleness:
        return ()
    sides = _sides(config, facts)
    if wanted == "auto":
        sharing = {role for group in groups(config) for role in _sharing(config, group, sides)}
        sides = tuple(tuple(role for role in side if role in sharing) for side in sides)
    return sides if all(sides) else ()


def _sides(config: Config, facts: Mapping[str, Facts]) -> tuple[tuple[str, ...], ...]:
    """Give the roles that work while the policy is trained alone, and those while it generates alone."""
    training = {"backend", *facts["algorithm"].roles}
    generation = {"generator", *(role for path, found in facts.items() if path != "algorithm" for role in found.roles)}
    names = role_names(config)
    return tuple(name for name in names if name in training - generation), tuple(
        name for name in names if name in generation - training
    )


def _sharing(config: Config, group: Sequence[str], sides: Sequence[Sequence[str]]) -> list[str]:
    """Give the roles of a group of processes that share its GPUs, where there are some of either side."""
    on_gpus = [role for role in group if config.cluster.gpus.get(role)]
    return on_gpus if all(any(role in side for role in on_gpus) for side in sides) else []


def _unable(config: Config, facts: Mapping[str, Facts], roles: Sequence[str]) -> Iterator[str]:
    for role in roles:
        device = "cuda" if config.cluster.gpus.get(role) else "cpu"
        can = facts[role_path(role)].sleeps
        if device not in can:
            which = f"{role_selection(config, role).name} of the {role}"
            where = f"on {' and '.join(can)} alone, and runs on {device}" if can else "nowhere"
            yield f"{which} can give memory back {where}"
