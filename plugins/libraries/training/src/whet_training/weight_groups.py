"""Weights with a learning rate or weight decay of their own, chosen by regular expressions on their names."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from attrs import field, frozen
from attrs.validators import min_len, optional

from whet.component import Problem
from whet.config.bounds import above, between
from whet.errors import ConfigError


@frozen
class WeightGroup:
    """Weights with settings of their own."""

    match: str = field(validator=min_len(1))
    """A regular expression (Python's `re.search`) on the names that weights have in `transformers`, e.g.
    `embed_tokens` or `layers\\.[0-3]\\.`. If several groups match a weight, the first counts."""
    lr: float | None = field(default=None, validator=optional(above(0, 10)))
    """Peak learning rate. null: that of the optimizer, or for matrices that Muon trains, `muon.lr`."""
    lr_factor: float = field(default=1.0, validator=between(0, 1000))
    """A factor on the learning rate. 0: the weights stay as they are, and have no part in `grad_norm`."""
    weight_decay: float | None = field(default=None, validator=optional(between(0, 100)))
    """Decoupled weight decay, of vectors too. null: that of the optimizer, and none for vectors."""


@frozen
class Rates:
    """The peak learning rate and the decoupled weight decay of a weight."""

    peak: float
    decay: float


def rates(weights: Mapping[str, Rates], groups: Sequence[WeightGroup]) -> dict[str, Rates]:
    """Return the rates of each weight, by name, from those that it has outside of all groups."""
    found = {}
    for name, own in weights.items():
        peak, decay = own.peak, own.decay
        if (group := next((group for group in groups if re.search(group.match, name)), None)) is not None:
            peak = (peak if group.lr is None else group.lr) * group.lr_factor
            decay = decay if group.weight_decay is None else group.weight_decay
        found[name] = Rates(peak, decay)
    return found


def refuse_unmatched(names: Collection[str], groups: Sequence[WeightGroup]) -> None:
    """Raise `ConfigError` if a pattern is the first to match none of the weights that are trained."""
    hits = [0] * len(groups)
    for name in names:
        number = next((n for n, group in enumerate(groups) if re.search(group.match, name)), None)
        if number is not None:
            hits[number] += 1
    for number, group in enumerate(groups):
        if names and not hits[number]:
            earlier = ", that no group before it matches" if any(re.search(group.match, n) for n in names) else ""
            raise ConfigError(
                f"backend.optimizer.groups.{number}.match: {group.match!r} matches no weight{earlier}; the model has "
                f"{len(names)} weights: {', '.join(list(names)[:3])} and so on"
            )


def problems(groups: Sequence[WeightGroup], path: str) -> Iterator[Problem]:
    """Yield what is wrong with groups by themselves. They stand at `path`."""
    for number, group in enumerate(groups):
        where = f"{path}.{number}"
        yield from pattern_problems(group.match, f"{where}.match")
        if group.lr is not None and group.lr_factor != 1:
            words = f"is {group.lr_factor:g}, and lr is {group.lr:g}; state one of the two"
            yield Problem(f"{where}.lr_factor", words)


def pattern_problems(pattern: str, path: str) -> Iterator[Problem]:
    """Yield a problem if a pattern is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield Problem(path, f"is no regular expression: {pattern!r}: {error}")
