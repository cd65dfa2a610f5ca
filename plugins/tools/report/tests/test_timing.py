"""Each instant of a step is counted once, whoever works beside whom."""

import itertools
import random
import sys
from collections import Counter

import pytest

from whet_report.timing import DETAILED_STEPS, MOST_BARS, Window, inside, phases, shares, timing, windows


def span(role, phase, begin, seconds, step=1):
    return {"role": role, "phase": phase, "begin": begin, "seconds": seconds, "step": step}


def test_parts_of_a_step_add_up_to_it():
    spans = phases([
        span("rollout", "take", 0.0, 4.0),
        span("generator", "generate", -1.0, 8.0),  # beside the driver, from the step before into the next
        span("backend", "train", 4.0, 2.0),
        span("backend", "record", 4.5, 0.5),  # inside another phase
        span("backend", "weight_sync", 9.0, 0.5),
    ])  # fmt: skip
    found = shares(Window(1, 0.0, 10.0), spans)
    assert found == pytest.approx(
        {
            "rollout.take": 4,
            "backend.train": 1.5,
            "backend.record": 0.5,
            "generator.generate": 1,
            "backend.weight_sync": 0.5,
            "other": 2.5,
        }
    )


def test_a_window_goes_from_the_first_phase_to_the_writing_of_the_metrics():
    rows = [{"step": 1, "time": 110.0, "seconds/step": 4.0}, {"step": 2, "time": 120.0, "seconds/step": 3.0}]
    spans = phases(
        [span("backend", "start", 100.0, 5.0), span("run", "save", 110.5, 1.0, 2), span("generator", "generate", 90, 1)]
    )
    assert windows(rows, spans) == [Window(1, 100.0, 110.0), Window(2, 110.5, 120.0)]


def test_long_runs_get_few_bars_and_their_slowest_steps_in_detail():
    rows, spans, now = [], [], 0.0
    for step in range(1, 5001):
        seconds = 9.0 if step == 3333 else 1.0
        spans.append(span("backend", "train", now, seconds, step))
        now += seconds
        rows.append({"step": step, "time": now, "seconds/step": seconds})
    found = timing(rows, spans)
    assert len(found["bars"]) == MOST_BARS
    assert found["totals"] == pytest.approx([now], rel=1e-4)
    detailed = [detail["step"] for detail in found["details"]]
    assert len(detailed) <= DETAILED_STEPS
    assert {1, 3333, 5000} <= set(detailed)


def test_parts_are_those_that_are_found_by_looking_at_every_instant():
    rng = random.Random(1)
    roles = ("generator", "rollout", "backend", "run")
    spans = phases(
        span(rng.choice(roles), str(i), rng.randrange(40), rng.randrange(12), step=1) for i in range(60)
    )  # fmt: skip
    steps = [Window(step, 10.0 * step, 10.0 * step + 9.0) for step in range(4)]
    for position, found in inside(steps, spans):
        window = steps[position]
        wanted = Counter[str]()
        for half in range(2 * round(window.begin) + 1, 2 * round(window.end), 2):  # begins and ends are whole numbers
            at = [s for s in spans if s.begin <= half / 2 < s.end]
            chosen = max(at, key=lambda s: (s.role != "generator", s.begin), default=None)
            wanted[f"{chosen.role}.{chosen.name}" if chosen else "other"] += 1
        assert shares(window, found) == wanted


def test_a_run_ten_times_as_long_takes_ten_times_as_long_to_read_even_where_a_phase_lasts_all_the_time():
    def lines_run(steps):
        rows = [{"step": step, "time": 1.0 + step, "seconds/step": 1.0} for step in range(steps)]
        spans = [span("backend", "train", step, 0.9, step) for step in range(steps)]
        spans.append(span("generator", "generate", 0.0, steps, 0))
        count = itertools.count()

        def trace(frame, event, argument):
            next(count)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            timing(rows, spans)
        finally:
            sys.settrace(before)
        return next(count)

    assert lines_run(2000) < 15 * lines_run(200)  # a hundred times, were every span looked at for every step


def test_no_metrics_no_bars():
    assert timing([], [])["bars"] == []
