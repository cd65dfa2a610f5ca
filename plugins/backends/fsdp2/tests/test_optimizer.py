"""What the backend tells of a schedule that would train nothing, and when."""

import attrs
import pytest

from whet.component import Spec
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config
from whet_testing.role_context import make_context
from whet_training.schedule import ScheduleConfig

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")


@pytest.fixture
def build(tiny_model_folder, tmp_path):
    """Return a function that builds a backend with a schedule, of an algorithm that states so many steps."""
    built = []

    def make(kind, steps, *, trained=True):
        context = make_context(tmp_path / str(len(built)), "backend", tiny_model_folder)
        context = attrs.evolve(context, optimizer_steps=steps, trained=trained)
        built.append(Fsdp2Backend(Fsdp2Config(schedule=ScheduleConfig(kind)), context))
        return built[-1]

    yield make
    for backend in built:
        backend.close()


def test_steps_after_those_that_the_algorithm_states_are_warned_of_once(build, batch, caplog, tmp_path):
    backend = build("linear", 2)
    peak = Fsdp2Config().optimizer.lr
    rates = [backend.train(batch, LIKELIHOOD)["lr"].number() for _ in range(2)]
    assert rates == pytest.approx([peak / 2, 0])
    assert not caplog.messages
    backend.save(tmp_path / "saved").result()
    for _ in range(2):
        backend.train(batch, LIKELIHOOD)
    (told,) = caplog.messages
    assert "optimizer step 3 comes after the 2 that the algorithm states" in told
    resumed = build("linear", 2)
    resumed.load(tmp_path / "saved")
    resumed.train(batch, LIKELIHOOD)
    assert caplog.messages == [told, told]


def test_a_constant_rate_has_no_end(build, batch, caplog):
    backend = build("constant", 1)
    for _ in range(2):
        assert backend.train(batch, LIKELIHOOD)["lr"].number() == Fsdp2Config().optimizer.lr
    assert not caplog.messages


def test_a_run_that_would_train_nothing_is_warned_of_before_it_begins(build, caplog):
    build("cosine", 1, trained=False)
    assert not caplog.messages
    build("cosine", 1)
    (told,) = caplog.messages
    assert "the learning rate of all steps is 0" in told
