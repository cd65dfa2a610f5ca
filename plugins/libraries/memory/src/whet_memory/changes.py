"""Changes that make a plan fit, each of them planned and predicted again, the cheapest first.

one change of a section  ->  several together  ->  more GPUs  ->  more GPUs and a change  ->  what learns something else

A change that contains another sufficient change is left out. If fewer than `WANTED` changes are enough, changes that
need less memory, but still too much, are named, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final

from attrs import evolve, field, frozen

from whet.errors import ConfigError
from whet.plan.memory import HOST, size
from whet.plan.placement import Machine
from whet.plan.prepare import Prepared
from whet.run.checkpoint import newest
from whet.run.run_folder import RunFolder
from whet_memory.case import Forecast
from whet_memory.places import Moment
from whet_memory.roles import case_of

Planned = Callable[[Sequence[str], Machine | None], Prepared]
"""(further overrides, another machine or None) -> the plan."""
Predict = Callable[[Prepared], list[Moment]]
WANTED: Final = 3
"""Changes to name."""
MOST_GPUS: Final = 64
DOUBT: Final = 1.02
"""The share of the memory up to which an estimate by formulas may be for a change to be traced."""
TRACES: Final = 5
"""Traces of a search, of about a second each for a large model."""
CLEAR: Final = 0.97
"""A change, or a part of one, counts as helpful if it lowers the need to at most this share."""


@frozen(eq=False)
class Part:
    """One change of one key, or more GPUs."""

    overrides: tuple[str, ...]
    cost: str
    other_result: bool = False
    times: int = 1
    """How many times as many GPUs it takes."""
    machine: Machine | None = None
    gpus: int = 0
    """GPUs of that machine; 0: it is the machine of the plan."""

    @property
    def key(self) -> str:
        """Return the key that is changed."""
        return self.overrides[0].partition("=")[0]


Change = tuple[Part, ...]


@frozen
class Search:
    """Plans and predicts changes."""

    planned: Planned
    exact: Predict
    estimate: Predict
    before: Moment
    """The moment that lacks most."""
    ratio: float
    """How far the formulas were off for the plan as it is: prediction / estimate."""
    enough: list[Change] = field(factory=list)
    """Changes that make it fit."""
    estimates: dict[Change, tuple[Prepared | None, list[Moment]]] = field(factory=dict)
    """Changed plans, with their moments by formulas."""
    traces: list[Change] = field(factory=list)
    """Changes that were traced."""
    nearer: dict[Change, float] = field(factory=dict)
    """For each change that is not enough: the estimated share of the need that is left."""
    mended: set[str] = field(factory=set)
    """Phases that some change makes fit."""

    def first(self, candidates: Iterable[Change]) -> Iterator[str]:
        """Yield the line of the first of these changes that makes the plan fit, if there is one."""
        ratio = self.ratio
        for change in candidates:
            if any(contains(change, known) for known in self.enough) or not self._all_help(change):
                continue
            after = self._after(change, ratio)
            if after and all(moment.fits for moment in after):
                self.enough.append(change)
                yield self.words(change, worst(after).needs)
                return
            if after:  # assumes the same error of the formulas for the next change of this kind
                ratio = worst(after).share / worst(self._estimated(change)[1]).share

    def _after(self, change: Change, ratio: float) -> list[Moment]:
        """Return the moments of a changed plan by a trace. Empty: formulas show that it does not fit, or it cannot be
        planned, or there were enough traces. `ratio`: how far the formulas are off.
        """
        other, rough = self._estimated(change)
        if other is None or not rough:
            return []
        traced = self.hopeful(change, ratio) and len(self.traces) < TRACES
        found = list[Moment]()
        if traced:
            self.traces.append(change)
            found = self.exact(other)
        self.mended.update({moment.phase for moment in found or rough} - unfit(found or rough))
        left = worst(found).needs if found else worst(rough).needs * ratio
        self.nearer[change] = left / self.before.needs
        return found

    def _all_help(self, change: Change) -> bool:
        """Return whether each part of a change makes it clearly smaller, as far as formulas show."""
        needs = self._needs(change)
        rest = [tuple(part for part in change if part is not one) for one in change]
        return len(change) == 1 or all(needs <= CLEAR * self._needs(parts) for parts in rest)

    def hopeful(self, change: Change, ratio: float | None = None) -> bool:
        """Return whether a change may be enough, as far as formulas show."""
        _, rough = self._estimated(change)
        return bool(rough) and worst(rough).share * (ratio or self.ratio) <= DOUBT

    def _needs(self, change: Change) -> float:
        _, rough = self._estimated(change)
        return worst(rough).needs if rough else float("inf")

    def _estimated(self, change: Change) -> tuple[Prepared | None, list[Moment]]:
        """Return the changed plan and its moments by formulas. None: it cannot be planned."""
        if change not in self.estimates:
            machine = next((part.machine for part in change if part.machine), None)
            try:
                other = self.planned([text for part in change for text in part.overrides], machine)
                self.estimates[change] = other, self.estimate(other)
            except ConfigError:
                self.estimates[change] = None, []
        return self.estimates[change]

    def words(self, change: Change, needs: float) -> str:
        """Return a line on a change: what it is, the most memory before and after it, and what it costs."""
        before = self.before.needs
        fits = f"{size(before)} -> {size(needs)} (-{size(before - needs)})"
        gpus = max(part.gpus for part in change)
        costs = "; ".join(dict.fromkeys(part.cost for part in change))
        text = " ".join(text for part in change for text in part.overrides)
        return f"  {text}: {fits}{f', on {gpus} GPUs' if gpus else ''}; costs {costs}"


def contains(change: Change, other: Change) -> bool:
    """Return whether a change has each part of another one, or a larger change of the same key."""
    times = {part.key: part.times for part in change}
    return all(times.get(part.key, 0) >= part.times for part in other)


def worst(found: Sequence[Moment]) -> Moment:
    """Return the moment that lacks most."""
    return max(found, key=lambda moment: (moment.share, moment.needs))


def unfit(found: Iterable[Moment]) -> set[str]:
    """Return the phases that do not fit."""
    return {moment.phase for moment in found if not moment.fits}


def changes(
    prepared: Prepared, planned: Planned, found: Sequence[Moment], exact: Predict, estimate: Predict
) -> tuple[list[str], list[str]]:
    """Return lines on changes that make a plan fit or bring it nearer, and what does not fit, as problems."""
    before = worst(found)
    ratio = before.share / max(worst(estimate(prepared)).share, 1e-9)
    search = Search(planned, exact, estimate, before, ratio)
    told = list[str]()
    for candidates in _candidates(search, prepared, before):
        told += search.first(candidates)
        if len(told) == WANTED:
            break
    lines = [f"changes that make it fit, by the same prediction ({len(told)} found):", *told] if told else []
    lines += _nearer(search, WANTED - len(told))
    stubborn = unfit(found) - search.mended
    if not told:
        phases = f" the phase {' or '.join(sorted(stubborn))} fit" if stubborn else " it fit"
        lines.append(f"no change that was tried makes{phases}: take GPUs with more memory, or a smaller model")
    elif len(told) < WANTED:
        lines.append("  besides: GPUs with more memory, or a smaller model")
    where = before.where(found)
    where = f"the {where}" if before.place == HOST else where
    problem = (
        f"cluster.memory: {where} has {size(before.has or 0)}, and {before.role} needs {size(before.needs)} of it "
        f"in the phase {before.phase}, as predicted; `cluster.memory: ignore` tries it all the same"
    )
    known = any(text.partition("cluster.memory: ")[1] for text in prepared.plan.refusals)
    return lines, [] if known else [problem]


def _nearer(search: Search, count: int) -> Iterator[str]:
    """Yield lines on at most `count` changes of one key: the most helpful ones that were not traced or not enough."""
    helped = sorted((left, number) for number, left in enumerate(search.nearer.values()) if left <= CLEAR)
    tried, by_key = list(search.nearer), dict[str, tuple[Change, float]]()
    for left, number in helped:
        change = tried[number]
        if len(change) == 1 and not any(contains(change, known) for known in search.enough):
            by_key.setdefault(change[0].key, (change, left))
    found = [(change, left * search.before.needs) for change, left in list(by_key.values())[:count]]
    for head, enough in (
        ("changes that may make it fit, estimated by formulas alone:", True),
        ("changes that bring it nearer, but are not enough alone, estimated by formulas:", False),
    ):
        chosen = [one for one in found if (one[1] <= (search.before.has or 0)) == enough]
        yield from [head] * bool(chosen)
        yield from (search.words(change, needs) for change, needs in chosen)


def _candidates(search: Search, prepared: Prepared, before: Moment) -> Iterator[Iterable[Change]]:
    """Yield groups of changes, each from the cheapest to the most expensive. One of each that is enough is wanted."""
    parts = list(_savings(prepared, before))
    same, other = [[part for part in parts if part.other_result == wanted] for wanted in (False, True)]
    keys = dict.fromkeys(part.key for part in same)
    by_key = [[part for part in same if part.key == key] for key in keys]
    yield from ([(part,) for part in of_one] for of_one in by_key)
    most = [of_one[-1] for of_one in by_key]
    together = [found for count in range(2, len(most) + 1) for found in combinations(most, count)]
    yield together
    more = list(_more_gpus(prepared, before))
    yield [(part,) for part in more]
    with_any = [*((one,) for one in most), *together]
    hopeful = (part for part in more if search.hopeful((part, *most)))
    yield ((part, *rest) for part in hopeful for rest in with_any)
    yield ((part, *rest) for part in other if search.hopeful((part, *most)) for rest in [(), *with_any])
    yield ((gpus, part, *rest) for gpus in more for part in other for rest in [(), *together[-1:]])


def _savings(prepared: Prepared, before: Moment) -> Iterator[Part]:
    """Yield the changes that components offer, beginning with the role that lacks memory."""
    plan, begun = prepared.plan, newest(RunFolder(prepared.config.run.folder)) > 0
    for one in sorted(plan.roles, key=lambda role: role.role != before.role):
        role = prepared.roles[one.role]
        if isinstance(role.facts.forecast, Forecast):
            case = case_of(prepared.config, prepared.roles, plan, one, role.facts.forecast)
            for saving in role.facts.forecast.savings(case):
                if begun and saving.new_run:
                    continue
                value = str(saving.value).lower() if isinstance(saving.value, bool) else saving.value
                yield Part((f"{role.path}.{saving.key}={value}",), saving.cost, saving.other_result)
    if prepared.config.model.dtype == "float32":
        yield Part(("model.dtype=bfloat16",), "other rounding; the trained weights stay float32")


def _more_gpus(prepared: Prepared, before: Moment) -> Iterator[Part]:
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
        yield Part(overrides, f"{factor} times the GPUs", times=factor, machine=larger, gpus=wanted if larger else 0)
        factor *= 2
