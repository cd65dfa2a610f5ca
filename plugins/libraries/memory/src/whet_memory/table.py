"""The predicted peaks as lines for people."""

from collections.abc import Iterator, Mapping, Sequence

from whet.plan.memory import HOST, size
from whet_memory.case import Peak
from whet_memory.places import Moment
from whet_memory.roles import Predicted

_SOURCES = {
    "trace": "traced: the training step itself, on tensors without memory",
    "formulas": "by formulas, which can be a fifth off",
    "terms": "weights, cache and the like alone, without activations",
}


def lines(predicted: Mapping[str, Predicted], found: Sequence[Moment]) -> Iterator[str]:
    """Yield the table: a line for each role and phase, at its fullest GPU and host."""
    yield "memory, the predicted peak of each phase:"
    header = ("role", "phase", "one rank", "with all that is on the fullest GPU or host then")
    rows = [header, *_rows(predicted, found)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        yield "  " + "  ".join((*(row[i].ljust(widths[i]) for i in range(3)), row[3])).rstrip()
    for words in dict.fromkeys(_source(one) for one in predicted.values()):
        yield f"  {', '.join(name for name, one in predicted.items() if _source(one) == words)}: {words}"
    if names := [name for name, one in predicted.items() if one.stages]:
        yield f"  {', '.join(names)}: of one rank of each pipeline stage, from the first to the last"
    for words in dict.fromkeys(one.note for one in predicted.values() if one.note):
        yield f"  {', '.join(name for name, one in predicted.items() if one.note == words)}: {words}"
    for name, one in predicted.items():
        if one.why:
            yield f"  {name} was not traced: {one.why}"


def _source(one: Predicted) -> str:
    exact = "; `whet check --trace` is exact" if one.source == "formulas" and one.traceable else ""
    return _SOURCES[one.source] + exact


def _rows(predicted: Mapping[str, Predicted], found: Sequence[Moment]) -> Iterator[tuple[str, str, str, str]]:
    for name, one in predicted.items():
        for phase, peak in one.peaks.items():
            own = " | ".join(_of_one(stage[phase]) for stage in one.stages) or _of_one(peak)
            own += " + cache" if one.share and phase in ("idle", "generation") else ""
            here = [moment for moment in found if (moment.role, moment.phase) == (name, phase)]
            worst = [
                max(group, key=lambda moment: (moment.share, moment.needs))
                for group in ([m for m in here if m.place != HOST], [m for m in here if m.place == HOST]) if group
            ]  # fmt: skip
            yield name, phase, own, "; ".join(_words(moment, found) for moment in worst)


def _of_one(peak: Peak) -> str:
    return size(peak.device) + (f" + {size(peak.host)} host" if peak.host else "")


def _words(moment: Moment, found: Sequence[Moment]) -> str:
    of = f" of {size(moment.has)}" if moment.has is not None else ""
    return f"{moment.where(found)}: {size(moment.needs)}{of}{'' if moment.fits else '  DOES NOT FIT'}"
