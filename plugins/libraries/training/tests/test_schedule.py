import math

import attrs
import pytest

from whet_training.schedule import ScheduleConfig, learning_rate, past_end, without_rate


def rates(schedule: ScheduleConfig, steps: int = 10, total: int = 10) -> list[float]:
    return [learning_rate(schedule, 2.0, step, total) for step in range(1, steps + 1)]


def test_the_rate_rises_over_the_warm_up_and_then_stays():
    assert rates(ScheduleConfig(warmup_steps=4)) == [0.5, 1.0, 1.5, 2.0] + [2.0] * 6


def test_linear_ends_at_its_floor_and_stays_there():
    found = rates(ScheduleConfig("linear", warmup_steps=2, min_ratio=0.25), steps=12)
    assert found[:2] == [1.0, 2.0]
    assert found[5] == pytest.approx(2.0 * (0.25 + 0.75 * 0.5))
    assert found[9:] == [0.5, 0.5, 0.5]


def test_cosine_is_half_way_down_in_the_middle():
    found = rates(ScheduleConfig("cosine"))
    assert found[4] == pytest.approx(1.0)
    assert found[9] == pytest.approx(0.0)
    assert found[0] == pytest.approx(1 + math.cos(math.pi / 10))


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_counted_from_0_it_is_the_schedule_of_transformers(kind, warmup):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    name = "constant_with_warmup" if kind == "constant" else kind
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=10)
    expected = []
    for _ in range(12):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    found = rates(ScheduleConfig(kind, warmup_steps=warmup, counted_from=0), steps=12)
    assert found[:11] == pytest.approx(expected[:11])  # afterwards the cosine of transformers rises again


def test_wsd_is_constant_and_then_decays_over_its_last_steps():
    schedule = ScheduleConfig("wsd", warmup_steps=2, decay_ratio=0.4, min_ratio=0.25)
    assert rates(schedule, steps=12) == pytest.approx([1, 2, 2, 2, 2, 2, 1.625, 1.25, 0.875, 0.5, 0.5, 0.5])
    root = attrs.evolve(schedule, decay="1-sqrt")
    falling = [0.5 + 1.5 * (1 - math.sqrt(share)) for share in (0.25, 0.5, 0.75)]
    assert rates(root, steps=11) == pytest.approx([1, 2, 2, 2, 2, 2, *falling, 0.5, 0.5])


@pytest.mark.parametrize("decay", ["linear", "cosine", "1-sqrt"])
def test_wsd_counted_from_0_is_that_of_transformers(decay):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = transformers.get_wsd_schedule(optimizer, 0, 4, num_stable_steps=6, decay_type=decay, min_lr_ratio=0.25)
    expected = []
    for _ in range(12):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    schedule = ScheduleConfig("wsd", decay_ratio=0.4, decay=decay, min_ratio=0.25, counted_from=0)
    assert rates(schedule, steps=12) == pytest.approx(expected)


def test_wsd_decays_after_its_warm_up_even_if_the_decay_would_begin_earlier():
    assert rates(ScheduleConfig("wsd", warmup_steps=8, decay_ratio=0.5))[6:] == pytest.approx([1.75, 2, 1, 0])
    assert rates(ScheduleConfig("wsd", decay_ratio=0.01))[8:] == [2, 0], "the decay has at least one step"


def test_a_warm_up_as_long_as_the_run_is_no_error():
    assert rates(ScheduleConfig("linear", warmup_steps=10))[-1] == 2.0
    assert rates(ScheduleConfig("linear", warmup_steps=10), steps=11)[-1] == 0.0


def test_a_warm_up_by_its_share_is_one_by_its_steps():
    for kind in ("constant", "linear", "cosine", "wsd"):
        by_share = rates(ScheduleConfig(kind, warmup_ratio=0.3), steps=12)
        assert by_share == rates(ScheduleConfig(kind, warmup_steps=3), steps=12)
    assert rates(ScheduleConfig(warmup_ratio=0.04)) == [2.0] * 10


@pytest.mark.parametrize(("steps", "share", "warmup"), [(4, 0.1, 1), (25, 0.1, 3), (30, 0.1, 3), (50, 0.03, 2)])
def test_the_share_of_a_warm_up_is_rounded_up(steps, share, warmup):
    by_share = rates(ScheduleConfig(warmup_ratio=share, counted_from=0), steps, total=steps)
    assert by_share == rates(ScheduleConfig(warmup_steps=warmup, counted_from=0), steps, total=steps)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_a_run_whose_steps_all_have_the_rate_0_is_warned_of(kind):
    schedule = ScheduleConfig(kind)
    assert rates(schedule, 1, 1) == [0.0]
    assert "the learning rate of all steps is 0" in without_rate(schedule, 1)
    assert not without_rate(schedule, 2)
    for other in ({"min_ratio": 0.1}, {"counted_from": 0}, {"total_steps": 2}, {"kind": "constant"}):
        assert not without_rate(attrs.evolve(schedule, **other), 1)
    assert without_rate(ScheduleConfig("linear", warmup_steps=1, counted_from=0), 1)
    assert not without_rate(schedule, 0), "the number of steps is not known"


def test_a_step_after_those_that_were_stated_is_warned_of_if_the_schedule_ends_there():
    schedule = ScheduleConfig("linear", min_ratio=0.25)
    assert past_end(schedule, 10, 10) == ""
    words = past_end(schedule, 11, 10)
    assert "step 11 comes after the 10" in words
    assert "0.25 times" in words
    assert rates(schedule, 11)[-1] == 0.25 * 2.0
    assert not past_end(attrs.evolve(schedule, kind="constant"), 11, 10)
    assert not past_end(attrs.evolve(schedule, total_steps=5), 11, 10), "the config states the end"
    assert not past_end(schedule, 11, 0), "the number of steps is not known"
