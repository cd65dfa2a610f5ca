"""The predicted and the measured peaks of a run, from its folder.

Roles that share processes see each other: what a role measures includes what the others hold then. So the prediction
beside it is that of the process: the phase of the role, and what every role that shares its processes holds meanwhile.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from whet.data.files import read_rows
from whet.plan.memory import size
from whet.run.run_folder import RunFolder
from whet_memory.case import PHASES
from whet_memory.measure import GIB

METRIC = "memory/"


@frozen
class Compared:
    """The peak of one phase on a rank, in bytes."""

    role: str
    phase: str
    measured: float
    predicted: int | None
    """None: it was not predicted."""
    source: str = ""


def compared(folder: RunFolder) -> list[Compared]:
    """Return the phases that were measured, each with its prediction."""
    plan: Any = folder.read_json("plan.json") or {}
    largest = dict[tuple[str, str], float]()
    file = folder.path / "metrics.jsonl"
    for row in read_rows(file) if file.exists() else ():
        for name, value in row.items():
            role, _, phase = name.removeprefix(METRIC).rpartition(".")
            if name.startswith(METRIC) and phase in PHASES and isinstance(value, int | float):
                largest[role, phase] = max(largest.get((role, phase), 0.0), value * GIB)
    order = {phase: i for i, phase in enumerate(PHASES)}
    return [
        Compared(role, phase, size_, *_predicted(plan, role, phase))
        for (role, phase), size_ in sorted(largest.items(), key=lambda item: (item[0][0], order[item[0][1]]))  # type: ignore[index]  # it is one of them
    ]  # fmt: skip


def _predicted(plan: Mapping[str, Any], role: str, phase: str) -> tuple[int | None, str]:
    """Return the prediction for the process of a role during one of its phases, and where it comes from."""
    peaks, roles = plan.get("peaks") or {}, plan.get("roles") or ()
    if phase not in peaks.get(role, {}):
        return None, ""
    own = peaks[role][phase]["device"]
    processes = {one["role"]: one["processes"] for one in roles}
    asleep = {name for side in plan.get("turns") or () for name in side if role not in side}
    together = [
        name for name, group in processes.items()
        if group == processes.get(role) and name not in {role, *asleep} and phase != "loading"
    ]  # fmt: skip
    others = sum(peaks[name]["idle"]["device"] for name in together if "idle" in peaks.get(name, {}))
    return own + others, str(peaks[role].get("source", ""))


def lines(found: list[Compared]) -> Iterator[str]:
    """Yield a table for people."""
    if not found:
        yield "no peaks were measured in this run: its backend reports none, or no step has ended"
        return
    width = max(len(f"{one.role}.{one.phase}") for one in found)
    yield f"{'peak of memory':{width}}  {'predicted':>12}  {'measured':>12}  measured - predicted"
    for one in found:
        name, measured = f"{one.role}.{one.phase}", size(one.measured)
        if one.predicted is None:
            yield f"{name:{width}}  {'-':>12}  {measured:>12}"
            continue
        off = one.measured - one.predicted
        sign = "-" if off < 0 else "+"
        yield f"{name:{width}}  {size(one.predicted):>12}  {measured:>12}  {sign}{size(abs(off))} ({one.source})"
