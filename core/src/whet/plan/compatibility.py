"""What fits what, derived from facts: an algorithm, its loss, advantages and filters."""

from collections.abc import Iterator

from whet.component import AdvantagesFacts, FilterFacts, LossFacts, Problem
from whet.plan.roles import Roles

LOSS, ADVANTAGES = "algorithm.loss", "algorithm.advantages"


def incompatibilities(name: str, roles: Roles) -> Iterator[Problem]:
    """Find what does not go together although each part is right by itself. `name` is the algorithm's."""
    algorithm, loss, advantages = roles.algorithm, roles.of(LossFacts).get(LOSS), roles.of(AdvantagesFacts)
    essential = algorithm.columns_essential
    if loss is not None and essential and not essential & loss.columns_read:
        wanted = " or ".join(repr(column) for column in sorted(essential))
        yield Problem(LOSS, f"reads no {wanted}, so nothing that {name} finds out would reach it")
    givers = ["algorithm"] if algorithm.token_advantages else []
    givers += [ADVANTAGES] if ADVANTAGES in advantages and advantages[ADVANTAGES].token_advantages else []
    if givers and loss is not None and not loss.token_advantages:
        words = f"wants one advantage for each sequence; as configured, {givers[-1]} gives each token its own"
        yield Problem(LOSS, words)
    for path, found in roles.of(FilterFacts).items():
        if algorithm.group_size is not None and found.least_group_size > algorithm.group_size:
            least, size = found.least_group_size, algorithm.group_size
            yield Problem(path, f"compares at least {least} samples of one task, and algorithm.group_size is {size}")
