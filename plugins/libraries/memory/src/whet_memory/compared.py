"""The predicted and the measured peaks of a run, from its folder.

Roles that share processes see each other: what a role measures includes what the others hold then. So the prediction
beside it is that of the process: the phase of the role, and what every role that shares its processes holds meanwhile.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from attrs import frozen

from whet.data.files import read_rows
from whet.errors import WhetError
from whet.plan.memory import size
from whet.run.run_folder import RunFolder
from whet_memory.case import PHASES
from whet_memory.measure import GIB

METRIC: Final = "memory/"
MOST: Final = 1e9
"""GiB, beyond which a number is no size of memory."""


@frozen
class Compared:
    """The peak of one phase on a rank, in bytes."""

    role: str
    phase: str
    measured: float
    predicted: int | None
    """None: it was not predicted."""
    source: str = ""
    """`trace`, `formulas` or `terms`."""
    cpu: bool = False
    """Whether it was measured on a CPU."""


def compared(folder: RunFolder) -> list[Compared]:
    """Return the phases that were measured in a run, each with its prediction. Raises `WhetError` if it is no run."""
    if not any((folder.path / name).is_file() for name in ("metrics.jsonl", "journal.jsonl", "config.yaml")):
        raise WhetError(
            f"{folder.path} holds no run: there is no metrics.jsonl, journal.jsonl or config.yaml in it; "
            "give the folder that is `run.folder` in the config"
        )
    file = folder.path / "metrics.jsonl"
    return compare(folder.read_json("plan.json"), read_rows(file) if file.exists() else ())


def compare(plan: Any, metrics: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """Return the phases that rows of `metrics.jsonl` measured, each with its prediction in `plan.json`.

    Values in another form than a run writes are ignored.
    """
    largest = dict[tuple[str, str], float]()
    for row in metrics:
        for name, value in row.items():
            role, _, phase = name.removeprefix(METRIC).rpartition(".")
            if name.startswith(METRIC) and phase in PHASES and isinstance(value, int | float) and 0 <= value < MOST:
                largest[role, phase] = max(largest.get((role, phase), 0.0), value * GIB)
    ordered = sorted(largest, key=lambda one: (one[0], [*PHASES].index(one[1])))  # type: ignore[arg-type]  # it is one
    roles = _listed(plan, "roles")
    on_cpu = {str(_at(one, "role")) for one in roles if _at(one, "devices") == ["cpu"]}
    return [
        Compared(role, phase, largest[role, phase], *_predicted(plan, role, phase), cpu=role in on_cpu)
        for role, phase in ordered
    ]


def _predicted(plan: Any, role: str, phase: str) -> tuple[int | None, str]:
    """Return the prediction for the process of a role during one of its phases, and where it comes from."""
    if (own := _bytes(plan, role, phase)) is None:
        return None, ""
    turns, roles = _listed(plan, "turns"), _listed(plan, "roles")
    processes = {str(_at(one, "role")): _at(one, "processes") for one in roles}
    asleep = {str(name) for side in turns if isinstance(side, list) and role not in side for name in side}
    together = [
        name for name, group in processes.items()
        if group == processes.get(role) and name != role and phase != "loading"
    ]  # fmt: skip
    others = sum(_bytes(plan, name, "asleep" if name in asleep else "idle") or 0 for name in together)
    return own + others, str(_at(plan, "peaks", role, "source"))


def _bytes(plan: Any, role: str, phase: str) -> int | None:
    found = _at(plan, "peaks", role, phase, "device")
    return found if isinstance(found, int) and not isinstance(found, bool) and abs(found) < MOST * GIB else None


def _listed(plan: Any, key: str) -> list[Any]:
    found = _at(plan, key)
    return found if isinstance(found, list) else []


def _at(value: Any, *path: str) -> Any:
    """Return what lies at a path of keys. None: nothing."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


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
    if any(one.source == "formulas" for one in found):
        yield "formulas assume full passes of `micro_batch_tokens`; `whet check --trace` before a run traces them"
    if any(one.cpu for one in found):
        yield "on a CPU, freed memory that the C library keeps counts as measured (MALLOC_MMAP_THRESHOLD_=65536: none)"
