"""The time to the first step is told once, with its parts."""

import time

import pytest

from whet.data.spans import Span
from whet.run.startup_time import Startup, process_began


def test_parts_and_the_rest_add_up_to_the_time_since_the_beginning():
    now = time.time()
    startup = Startup(now - 10)
    assert startup.metrics([Span("backend", "start", now - 9, 4.0)], 2.0, first=False) == {}
    inside = Span("backend", "weight_sync", now - 0.5, 0.25)  # of the first step, which is a part already
    before = Span("generator", "start", now - 5, 1.0)
    told = startup.metrics([before, inside], 2.0, first=True)
    assert told["seconds/startup"] == pytest.approx(10, abs=0.5)
    parts = {name.removeprefix("seconds/startup."): value for name, value in told.items() if "startup." in name}
    assert parts == pytest.approx(
        {"backend.start": 4.0, "generator.start": 1.0, "first step": 2.0, "other": 3.0}, abs=0.5
    )
    assert startup.metrics([before], 2.0, first=False) == {}


def test_a_moment_counts_for_the_phase_that_is_over_first():
    now = time.time()
    startup = Startup(now - 10)
    spans = [
        Span("run", "prepare", now - 9, 2.0),
        Span("ray", "start", now - 8, 4.0),
        Span("backend", "start", now - 7, 5.0),
        Span("generator", "start", now - 7, 6.0),
        Span("data", "tokenise", now - 1.0, 0.4),
    ]
    told = startup.metrics(spans, 0.5, first=True)
    parts = {name.removeprefix("seconds/startup."): value for name, value in told.items() if "startup." in name}
    assert parts == pytest.approx(
        {
            "prepare": 2,
            "ray.start": 3,
            "backend.start": 2,
            "generator.start": 1,
            "data.tokenise": 0.4,
            "first step": 0.5,
            "other": 1.1,
        },
        abs=0.1,
    )


def test_this_process_began_a_while_ago():
    assert time.time() - 3600 * 24 < process_began() < time.time()
