"""The feature `memory-forecast` of core: peaks for the plan of a run, and the table of `whet check`.

known_peaks    every plan: formulas, or a trace that was made before; no process is started
check          `whet check`: traces where formulas do not show ample room, and looks for changes that make it fit
given_machine  `whet check --machine`: the machines that words or a file describe
"""

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from attrs import frozen

from whet.config.sections import Config
from whet.plan.placement import RolePlan
from whet.plan.plan import Plan
from whet.plan.prepare import Prepared
from whet.plan.rank_placement import place_ranks
from whet.plan.roles import Roles
from whet.runtime.interpreters import located
from whet_memory.case import Forecast
from whet_memory.changes import Planned, changes
from whet_memory.given_machine import given_machine as given_machine
from whet_memory.places import Moment, moments
from whet_memory.roles import Predicted, predict
from whet_memory.table import lines
from whet_memory.tracer import Tracer

AMPLE: Final = 0.6
"""The share of a memory up to which formulas are trusted: they can be a fifth off."""
HOPELESS: Final = 10.0
"""The share of a memory from which on formulas are enough to show that it does not fit."""


@frozen
class Found:
    """What `whet check` shows of memory."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    """What does not fit, and what would change that."""
    peaks: Mapping[str, Mapping[str, Any]]


def known_peaks(config: Config, roles: Roles, plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the peaks of each role by phase, as built-in types, without starting a process."""
    tracers = {one.role: Tracer(_python(config, one)) for one in plan.roles}
    return {name: one.to_dict() for name, one in predict(config, roles, plan, tracers, start=False).items()}


def check(prepared: Prepared, planned: Planned, trace: bool = False) -> Found:
    """Return the table, problems and peaks of a plan. `planned` plans it again with further overrides.

    A training step is traced if `trace` asks for it, or if formulas do not show ample room.
    """
    with ExitStack() as stack:
        tracers = {
            one.role: stack.enter_context(Tracer(_python(prepared.config, one))) for one in _traceable(prepared)
        }  # fmt: skip
        predicted, found = _predicted(prepared, tracers, start=trace)
        shares = [moment.share for moment in found if moment.phase != "loading"]  # which no trace tells
        if not trace and AMPLE < max(shares, default=0.0) < HOPELESS:
            predicted, found = _predicted(prepared, tracers, start=True)
        table = list(lines(predicted, found))
        problems = list[str]()
        if prepared.config.cluster.memory != "ignore" and not all(moment.fits for moment in found):
            told, problems = changes(
                prepared, planned, found, lambda other: _predicted(other, tracers, start=True)[1],
                lambda other: _predicted(other, {}, start=False)[1],
            )  # fmt: skip
            table += told
    return Found(tuple(table), tuple(problems), {name: one.to_dict() for name, one in predicted.items()})


def _predicted(
    prepared: Prepared, tracers: Mapping[str, Tracer], *, start: bool
) -> tuple[dict[str, Predicted], list[Moment]]:
    plan, config = prepared.plan, prepared.config
    predicted = predict(config, prepared.roles, plan, tracers, start=start)
    placed = place_ranks(config.cluster, prepared.roles, plan.roles, prepared.machine)
    return predicted, moments(predicted, placed, plan.turns, prepared.machine)


def _traceable(prepared: Prepared) -> Iterable[RolePlan]:
    facts = {one.role: prepared.roles[one.role].facts.forecast for one in prepared.plan.roles}
    return [one for one in prepared.plan.roles if isinstance(facts[one.role], Forecast)]


def _python(config: Config, one: RolePlan) -> str:
    apart = one.python and config.cluster.workers == "process"
    return str(located(one.python)) if apart else sys.executable
