"""What fits what, derived from facts: an algorithm, its loss, advantages and filters."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from whet.component import Facts, Problem

if TYPE_CHECKING:
    from whet.config.sections import Config

LOSS, ADVANTAGES = "algorithm.loss", "algorithm.advantages"


def incompatibilities(config: "Config", facts: Mapping[str, Facts]) -> Iterator[Problem]:
    """Find what does not go together although each part is right by itself. `facts` are by path into the config."""
    yield from _ignored(config, facts)
    yield from _per_token(facts)
    yield from _groups(facts)


def _ignored(config: "Config", facts: Mapping[str, Facts]) -> Iterator[Problem]:
    essential = facts["algorithm"].columns_essential
    if LOSS in facts and essential and not essential & facts[LOSS].columns_read:
        wanted = " or ".join(repr(name) for name in sorted(essential))
        yield Problem(LOSS, f"reads no {wanted}, so nothing that {config.algorithm.name} finds out would reach it")


def _per_token(facts: Mapping[str, Facts]) -> Iterator[Problem]:
    givers = [path for path in ("algorithm", ADVANTAGES) if path in facts and facts[path].token_advantages]
    if givers and LOSS in facts and not facts[LOSS].token_advantages:
        yield Problem(
            LOSS, f"wants one advantage for each sequence; as configured, {givers[-1]} gives each token its own"
        )


def _groups(facts: Mapping[str, Facts]) -> Iterator[Problem]:
    size = facts["algorithm"].group_size
    for path, found in facts.items():
        if size is not None and found.least_group_size > size:
            yield Problem(
                path,
                f"compares at least {found.least_group_size} samples of one task, and algorithm.group_size is {size}",
            )
