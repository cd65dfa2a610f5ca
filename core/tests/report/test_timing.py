"""Each instant of a step is counted once, whoever works beside whom."""

import pytest

from whet.report.timing import DETAILED_STEPS, MOST_BARS, Window, phases, shares, timing, windows


def span(role, phase, begin, seconds, step=1):
    return {"role": role, "phase": phase, "begin": begin, "seconds": seconds, "step": step}


def test_parts_of_a_step_add_up_to_it():
    spans = phases([
        span("rollout", "take", 0.0, 4.0),
        span("generator", "generate", -1.0, 8.0),  # beside the driver, from the step before into the next
        span("backend", "train", 4.0, 2.0),
        span("backend", "record", 4.5, 0.5),  # inside another phase
        span("backend", "refit", 9.0, 0.5),
    ])  # fmt: skip
    found = shares(Window(1, 0.0, 10.0), spans)
    assert found == pytest.approx(
        {
            "rollout.take": 4,
            "backend.train": 1.5,
            "backend.record": 0.5,
            "generator.generate": 1,
            "backend.refit": 0.5,
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


def test_no_metrics_no_bars():
    assert timing([], [])["bars"] == []
