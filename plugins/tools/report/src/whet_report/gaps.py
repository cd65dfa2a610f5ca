"""How far sampler and trainer are apart on each recorded token: the worst tokens, and how common they are."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet_report.curves import rounded

WORST = 100
WORST_OF_ONE_SEQUENCE = 4
"""So that one bad sequence does not hide all others."""
DOTS = 1200
"""Tokens drawn in the comparison of both logprobs."""

Json = dict[str, Any]
Floats = NDArray[np.float64]


def gaps(sources: Sequence[Json]) -> Json:
    """Find the gaps in all recorded sequences, and write into each episode its widest (`gap`, in nats).

    A trainer's or sampler's logprob that is not finite counts as the widest gap of all, and is shown as such.
    """
    worst: list[Json] = []
    steps: dict[int, list[Floats]] = {}
    pairs: list[Floats] = []
    for place, where, episode in _sequences(sources):
        one = episode["sequences"][where[2]]
        positions, sampler, trainer = _trained(one)
        if not len(positions):
            continue
        gap = np.nan_to_num(np.abs(trainer - sampler), nan=np.inf, posinf=np.inf)
        episode["gap"] = max(episode.get("gap", 0.0), _finite(gap.max()))
        order = np.argsort(-gap, kind="stable")[:WORST_OF_ONE_SEQUENCE]
        worst += [{"at": [*where, int(positions[i])], "gap": _finite(gap[i])} for i in order]
        steps.setdefault(place["step"], []).append(gap)
        pairs.append(np.stack([sampler, trainer], 1))
    worst.sort(key=lambda found: -found["gap"])
    return {
        "worst": worst[:WORST],
        "steps": [_summary(step, np.concatenate(found)) for step, found in sorted(steps.items())],
        "dots": _dots(pairs),
    }


def _sequences(sources: Sequence[Json]) -> Iterator[tuple[Json, list[int], Json]]:
    for s, source in enumerate(sources):
        for e, episode in enumerate(source["episodes"]):
            for i in range(len(episode["sequences"])):
                yield source, [s, e, i], episode


def _trained(one: Json) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return positions [T] of tokens that have both logprobs, and both logprobs [T]; nan where one is not finite."""
    positions = np.flatnonzero(one["loss_mask"])
    columns = [np.array(one[name], np.float64) for name in ("sampler_logprobs", "trainer_logprobs")]
    if any(len(column) != len(one["loss_mask"]) for column in columns):
        return positions[:0], np.zeros(0), np.zeros(0)
    return positions, columns[0][positions], columns[1][positions]


def _finite(gap: float) -> float:
    """Return a gap as a finite number: a page holds no other. A gap that is not finite becomes 1e9."""
    return float(f"{min(gap, 1e9):.7g}")


def _summary(step: int, gap: Floats) -> Json:
    fine = gap[np.isfinite(gap)]
    mean, middle, high = (fine.mean(), *np.quantile(fine, (0.5, 0.99))) if len(fine) else (0.0, 0.0, 0.0)
    mean, middle, high = rounded([mean, middle, high])
    return {"step": step, "tokens": len(gap), "mean": mean, "median": middle, "p99": high, "max": _finite(gap.max())}


def _dots(pairs: Sequence[Floats]) -> list[list[float]]:
    """Return some pairs of logprobs, the widest gaps among them."""
    if not pairs:
        return []
    both = np.concatenate(pairs)
    both = both[np.isfinite(both).all(1)]
    widest = np.argsort(-np.abs(both[:, 0] - both[:, 1]), kind="stable")[: DOTS // 4]
    some = np.unique(np.concatenate([widest, np.arange(0, len(both), max(1, len(both) // DOTS))]))
    return [rounded(pair) for pair in both[some]]
