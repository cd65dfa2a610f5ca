"""What the optimizer tells of a schedule that would train nothing."""

import pytest

from whet.component import Spec

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")


def test_steps_after_those_that_the_algorithm_states_are_warned_of_once(make_worker, batch, caplog):
    worker = make_worker(schedule={"kind": "linear"})  # of ten steps
    worker._stepper.steps = 8
    rates = [worker.train(batch, LIKELIHOOD)["lr"].number() for _ in range(4)]
    assert rates == pytest.approx([1e-3, 0, 0, 0])
    (told,) = caplog.messages
    assert "optimizer step 11 comes after the 10 that the algorithm states" in told


def test_a_constant_rate_has_no_end(make_worker, batch, caplog):
    worker = make_worker()
    worker._stepper.steps = 10
    assert worker.train(batch, LIKELIHOOD)["lr"].number() == 1e-2
    assert not caplog.messages
