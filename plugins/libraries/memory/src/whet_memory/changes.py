"""Changes that make a plan fit, each of them planned and predicted again, the cheapest first.

one change of a component's section  ->  several together  ->  more GPUs  ->  more GPUs and several changes
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from attrs import evolve, frozen

from whet.errors import ConfigError
from whet.plan.memory import HOST, size
from whet.plan.placement import Machine
from whet.plan.prepare import Prepared
from whet_memory.case import Forecast
from whet_memory.places import Moment
from whet_memory.roles import case_of

Planned = Callable[[Sequence[str], Machine | None], Prepared]
"""(further overrides, another machine or None) -> the plan."""
Predict = Callable[[Prepared], list[Moment]]
WANTED: Final = 3
"""Changes to name."""
MOST_GPUS: Final = 64
DOUBT: Final = 1.15
"""How far above the memory an estimate by formulas may be for a trace to be worth its time."""


@frozen
class Change:
    """Overrides of a config, on a machine that may have more GPUs."""

    overrides: tuple[str, ...]
    cost: str
    machine: Machine | None = None
    gpus: int = 0
    """GPUs of that machine; 0: it is the machine of the plan."""


def worst(found: Sequence[Moment]) -> Moment:
    """Return the moment that lacks most."""
    return max(found, key=lambda moment: (moment.share, moment.needs))


def changes(
    prepared: Prepared, planned: Planned, found: Sequence[Moment], exact: Predict, estimate: Predict
) -> tuple[list[str], list[str]]:
    """Return lines on changes that make a plan fit, and what does not fit, as problems."""
    before = worst(found)
    ratio = before.share / max(worst(estimate(prepared)).share, 1e-9)
    told, stubborn = list[str](), _unfit(found)
    for kind in _kinds(prepared, before):
        for change in kind:  # of one kind the cheapest that fits is enough
            rough, after = _after(change, planned, exact, estimate, ratio)
            if after or rough:
                stubborn &= _unfit(after or rough)
            if after and not _unfit(after):
                told.append(_words(change, before, worst(after)))
                break
        if len(told) == WANTED:
            break
    head = [f"changes that make it fit, by the same prediction ({len(told)} found):"] if told else []
    rest = [] if len(told) == WANTED else ["  besides: GPUs with more memory, or a smaller model"]
    if stubborn and not told:
        phases = " or ".join(sorted(stubborn))
        rest = [
            f"no change that was tried makes the phase {phases} fit: take GPUs with more memory, or a smaller model"
        ]
    where = "the host" if before.place == HOST else before.place
    problem = (
        f"cluster.memory: {where} has {size(before.has or 0)}, and {before.role} needs {size(before.needs)} of it "
        f"in the phase {before.phase}, as predicted; `cluster.memory: ignore` tries it all the same"
    )
    known = any(text.partition("cluster.memory: ")[1] for text in prepared.plan.refusals)
    return [*head, *(f"  {line}" for line in told), *rest], [] if known else [problem]


def _unfit(found: Iterable[Moment]) -> set[str]:
    """Return the phases that do not fit."""
    return {moment.phase for moment in found if not moment.fits}


def _after(
    change: Change, planned: Planned, exact: Predict, estimate: Predict, ratio: float
) -> tuple[list[Moment], list[Moment]]:
    """Return the moments of a changed plan, by formulas and by a trace. Empty: it cannot be planned, or a trace is not
    worth its time, as the formulas show that it does not fit.
    """
    try:
        other = planned(change.overrides, change.machine)
    except ConfigError:
        return [], []
    rough = estimate(other)
    if not rough or (worst(rough).has is not None and worst(rough).share * ratio > DOUBT):
        return rough, []
    return rough, exact(other)


def _kinds(prepared: Prepared, before: Moment) -> Iterator[Iterable[Change]]:
    """Yield kinds of changes, each from the cheapest to the dearest."""
    single = list(_savings(prepared, before))
    keys = [change.overrides[0].partition("=")[0] for change in single]
    by_key = {key: [change for change in single if change.overrides[0].startswith(f"{key}=")] for key in keys}
    yield from by_key.values()
    last = [changes[-1] for changes in by_key.values()]
    yield [_joined(last[:end]) for end in range(2, len(last) + 1)]
    more = list(_more_gpus(prepared, before))
    yield more
    for one in more:
        for kind in list(by_key.values())[:2]:
            yield [_on_more(one, change) for change in kind]


def _savings(prepared: Prepared, before: Moment) -> Iterator[Change]:
    """Yield the changes that components offer, those of the role that lacks memory first."""
    plan = prepared.plan
    for one in sorted(plan.roles, key=lambda role: role.role != before.role):
        role = prepared.roles[one.role]
        if isinstance(role.facts.forecast, Forecast):
            case = case_of(prepared.config, prepared.roles, plan, one, role.facts.forecast)
            for saving in role.facts.forecast.savings(case):
                value = str(saving.value).lower() if isinstance(saving.value, bool) else saving.value
                yield Change((f"{role.path}.{saving.key}={value}",), saving.cost)
    if prepared.config.model.dtype == "float32":
        yield Change(("model.dtype=bfloat16",), "other rounding; the trained weights stay float32")


def _joined(parts: Sequence[Change]) -> Change:
    costs = dict.fromkeys(part.cost for part in parts)
    return Change(tuple(text for part in parts for text in part.overrides), "; ".join(costs))


def _on_more(more: Change, change: Change) -> Change:
    return evolve(_joined([more, change]), machine=more.machine, gpus=more.gpus)


def _more_gpus(prepared: Prepared, before: Moment) -> Iterator[Change]:
    """Yield plans on twice as many GPUs, four times as many, ..., for all roles that share processes."""
    roles, cluster = prepared.roles, prepared.config.cluster
    group = [name for name in roles[before.role].group if cluster.gpus.get(name)]
    if before.place == HOST or not group:
        return
    factor = 2
    while max(cluster.gpus[name] for name in group) * factor <= MOST_GPUS:
        overrides = tuple(f"cluster.gpus.{name}={cluster.gpus[name] * factor}" for name in group)
        wanted = sum(max(roles[name].gpus * (factor if name in group else 1) for name in g) for g in roles.groups)
        machine, size_of_one = prepared.machine, prepared.machine.gpu_bytes[:1]
        larger = None
        if not machine.others and wanted > machine.gpus:
            larger = evolve(machine, gpus=wanted, gpu_bytes=size_of_one * wanted, given=True)
        yield Change(overrides, f"{factor} times the GPUs", larger, wanted if larger else 0)
        factor *= 2


def _words(change: Change, before: Moment, after: Moment) -> str:
    less = size(before.needs - after.needs)
    fits = f"{size(before.needs)} -> {size(after.needs)} (-{less})"
    more = f", on {change.gpus} GPUs" if change.gpus else ""
    return f"{' '.join(change.overrides)}: {fits}{more}; costs {change.cost}"
