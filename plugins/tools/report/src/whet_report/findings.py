"""What deserves a look in the numbers of a run: a sentence each, with the view that shows more.

Rules of thumb, not verdicts; docs/how-to/read-a-report.md says what is behind each.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from whet_report.curves import Metrics

WIDE_GAP, MEAN_GAP = 1.0, 0.02
"""Nats between sampler and trainer, of one token and on average, from which rounding alone explains little."""
GROWTH = 5.0
"""How many times its early value the mean gap may reach."""
CUT_SHARE, EQUAL_SHARE, WAITING_SHARE = 0.2, 0.1, 0.75
LATE = 0.1
"""Share of the steps, at least five, that count as early or as late."""

Finding = dict[str, str]


def findings(metrics: Metrics, run: Mapping[str, Any]) -> list[Finding]:
    """Return findings, the gravest first: `level` (bad, look, good), `text`, and `view`, the part of the page."""
    found = [*_state(run), *_numbers(metrics), *_gap(metrics), *_rollouts(metrics)]
    return sorted(found, key=lambda one: ("bad", "look", "good").index(one["level"]))


def _finding(level: str, text: str, view: str = "") -> Finding:
    return {"level": level, "text": text, "view": view}


def _state(run: Mapping[str, Any]) -> Iterator[Finding]:
    if run["state"] == "failed":
        yield _finding("bad", f"The run failed after step {run['done']}.", "run")
    elif run["state"] == "finished":
        yield _finding("good", f"The run finished all its {run['done']} steps.")
    if run["replica_restarts"]:
        yield _finding("look", f"Replicas of the generator were lost and restarted: {run['replica_restarts']}.", "run")
    if run["run_restarts"]:
        text = f"Other workers were lost, and it began again after its last checkpoint: {run['run_restarts']}."
        yield _finding("look", text, "run")
    if (resumed := run["run_attempts"] - 1 - run["run_restarts"]) > 0:
        yield _finding("look", f"It was resumed: {resumed + 1} run attempts.", "run")


def _numbers(metrics: Metrics) -> Iterator[Finding]:
    lost = {n: s for s, row in reversed(metrics.items()) for n, value in row.items() if not math.isfinite(value)}
    for name, step in list(lost.items())[:5]:
        yield _finding("bad", f"{name} was not finite, first on step {step}.", "metrics")


def _gap(metrics: Metrics) -> Iterator[Finding]:
    early, late = _ends(metrics, "logprob_gap/mean")
    gaps = ((row.get("logprob_gap/max", 0.0), step) for step, row in metrics.items())
    widest = max((gap for gap in gaps if math.isfinite(gap[0])), default=(0.0, 0))
    if late > MEAN_GAP:
        yield _finding("bad", f"Sampler and trainer are {late:.2g} nats apart on an average token.", "gaps")
    if widest[0] > WIDE_GAP:
        text = f"On step {widest[1]} sampler and trainer were {widest[0]:.2g} nats apart on one token."
        yield _finding("look", text, "gaps")
    if late > GROWTH * early and late > 1e-5:
        text = f"The mean gap between sampler and trainer grew from {early:.1e} to {late:.1e} nats."
        yield _finding("look", text, "gaps")


def _rollouts(metrics: Metrics) -> Iterator[Finding]:
    _, cut = _ends(metrics, "response_length/cut")
    if cut > CUT_SHARE:
        yield _finding("look", f"Lately {cut:.0%} of the responses were cut by their length limit.", "rollouts")
    early, spread = _ends(metrics, "reward/std")
    if early > 0 and spread < EQUAL_SHARE * early:
        yield _finding(
            "look", "Rewards within a group hardly differ any more: little is left to learn from.", "metrics"
        )
    for name, what in (
        ("episodes/failed", "episodes failed"),
        ("groups/dropped", "groups were dropped"),
        ("grader/undecided", "responses could not be graded, and count as wrong"),
    ):
        count = sum(row[name] for row in metrics.values() if math.isfinite(row.get(name, math.nan)))
        if count:
            yield _finding("look", f"{count:.0f} {what}.", "metrics")
    _, whole = _ends(metrics, "seconds/step")
    _, waiting = _ends(metrics, "seconds/rollout.take")
    if whole > 0 and waiting > WAITING_SHARE * whole:
        yield _finding("look", f"Lately {waiting / whole:.0%} of a step went into waiting for rollouts.", "time")


def _ends(metrics: Metrics, name: str) -> tuple[float, float]:
    """Return a metric's means over its early and its late steps; zeros where it has none."""
    values = [row[name] for row in metrics.values() if math.isfinite(row.get(name, math.nan))]
    if not values:
        return 0.0, 0.0
    few = max(5, round(LATE * len(values)))
    return float(np.mean(values[:few])), float(np.mean(values[-few:]))
