import threading
import time

import pytest

from whet.data.spans import Spans


def test_a_phase_is_recorded_with_role_begin_and_length() -> None:
    spans, before = Spans(), time.time()
    with spans.phase("backend", "train"):
        time.sleep(0.02)
    (span,) = spans.drain()
    assert (span.role, span.phase) == ("backend", "train")
    assert before - 0.1 <= span.begin <= time.time()
    assert 0.015 < span.seconds < 5


def test_a_phase_that_raises_is_recorded_too() -> None:
    spans = Spans()
    with pytest.raises(KeyError), spans.phase("backend", "train"):
        raise KeyError
    assert [span.phase for span in spans.drain()] == ["train"]


def test_draining_takes_each_span_once() -> None:
    spans = Spans()
    with spans.phase("a", "b"):
        pass
    assert len(spans.drain()) == 1
    assert spans.drain() == []


def test_many_threads_lose_nothing() -> None:
    spans = Spans()

    def work() -> None:
        for _ in range(200):
            with spans.phase("a", "b"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans.drain()) == 1600


def test_a_phase_that_lasts_longer_than_a_step_is_cut_where_spans_are_drained() -> None:
    spans = Spans()
    with spans.phase("generator", "generate"):
        time.sleep(0.03)
        (first,) = spans.drain()
        time.sleep(0.01)
        with spans.phase("backend", "train"):
            pass
        trained, second = spans.drain()
    (last,) = spans.drain()
    assert trained.phase == "train"
    assert {span.phase for span in (first, second, last)} == {"generate"}
    assert first.seconds > 0.025
    assert second.seconds > 0.008
    assert second.begin == pytest.approx(first.begin + first.seconds)
    assert last.begin == pytest.approx(second.begin + second.seconds)
    assert spans.drain() == []
