"""The learning rate as a pure function of the optimizer step."""

import math
from collections.abc import Iterator
from typing import Literal

from attrs import field, frozen

from whet.component import Problem
from whet.config.bounds import STEPS, above, between


@frozen
class ScheduleConfig:
    """The learning rate over optimizer steps: a linear warm-up, then the chosen kind of decay."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The schedule after the warm-up. `wsd`: constant, then a decay over the last steps (warmup-stable-decay,
    arXiv:2404.06395)."""
    warmup_steps: int = field(default=0, validator=between(0, STEPS))
    """Optimizer steps over which the rate rises to its peak."""
    warmup_ratio: float = field(default=0.0, validator=between(0, 1))
    """Length of the warm-up as a share of `total_steps`, rounded up as in transformers; verl rounds down. 0.07 of 100
    steps are 7; transformers takes 8, because its product is 7.000000000000001. Set this or `warmup_steps`."""
    min_ratio: float = field(default=0.0, validator=between(0, 1))
    """The final learning rate of `linear`, `cosine` and `wsd`, as a share of the peak."""
    decay_ratio: float = field(default=0.1, validator=above(0, 1))
    """`wsd`: length of the decay as a share of `total_steps`."""
    decay: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """`wsd`: the shape of the decay. `cosine` is the default of transformers. `1-sqrt`: 1 minus the root of the share
    of the decay that has passed, which Hägele et al. 2024 (arXiv:2405.18392) found slightly better for pre-training."""
    total_steps: int = field(default=0, validator=between(0, STEPS))
    """Optimizer steps at which `linear`, `cosine` and `wsd` end. 0: all that the run takes of this model, e.g. the
    steps of the run times `minibatches` and `epochs`."""
    counted_from: int = field(default=1, validator=between(0, 1))
    """The number of the first optimizer step. 1: a warm-up begins above 0, and the last step has the final rate. 0: as
    in `transformers.get_scheduler` and Megatron-LM, where the first step of a warm-up has the rate 0. A warm-up
    always begins at 0; that of transformers' `wsd` begins at its final rate."""


def learning_rate(schedule: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """Return the learning rate of an optimizer step: 1 is the first. After `total_steps` the rate stays constant."""
    step += schedule.counted_from - 1
    # A product such as 0.1 * 30 is a little above the whole number that is meant.
    warmup = schedule.warmup_steps or math.ceil(round(schedule.warmup_ratio * total_steps, 6))
    if warmup and step <= warmup:
        return peak * step / warmup
    if schedule.kind == "constant":
        return peak
    begin = warmup
    if schedule.kind == "wsd":
        begin = max(warmup, total_steps - max(1, round(schedule.decay_ratio * total_steps)))
    span = total_steps - begin
    done = min(max(step - begin, 0) / span, 1.0) if span > 0 else 1.0
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * _height(schedule, done))


def _height(schedule: ScheduleConfig, done: float) -> float:
    """Return what is left of the decay where the share `done` of it has passed: from 1 to 0."""
    shape = schedule.decay if schedule.kind == "wsd" else schedule.kind
    if shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    if shape == "1-sqrt":
        return 1 - math.sqrt(done)  # Hägele et al. 2024, arXiv:2405.18392
    return 1 - done


def without_rate(schedule: ScheduleConfig, total_steps: int) -> str:
    """Return the warning that a run of so many optimizer steps trains nothing. Empty: a step has a rate above 0."""
    end = schedule.total_steps or total_steps
    if not total_steps or any(learning_rate(schedule, 1.0, step, end) for step in range(1, total_steps + 1)):
        return ""
    return (
        f"the learning rate of all steps is 0, so nothing is trained: the run takes {total_steps} optimizer steps, and "
        f"the schedule `kind: {schedule.kind}` has come down to 0 by the first of them; take more steps, or set "
        "schedule.kind: constant or schedule.min_ratio"
    )


def past_end(schedule: ScheduleConfig, step: int, total_steps: int) -> str:
    """Return the warning that an optimizer step comes after all that the run was to take. Empty: it does not, or the
    schedule has an end of its own, or none.
    """
    if schedule.kind == "constant" or schedule.total_steps or not 0 < total_steps < step:
        return ""
    return (
        f"optimizer step {step} comes after the {total_steps} that the algorithm states for the whole run, where the "
        f"schedule `kind: {schedule.kind}` ends: this step and all later ones have {schedule.min_ratio:g} times the "
        "highest learning rate. Let `optimizer_steps` of the algorithm's facts return the steps that it takes, or set "
        "schedule.total_steps"
    )


def problems(schedule: ScheduleConfig, path: str) -> Iterator[Problem]:
    """Yield what is wrong with a schedule by itself, beyond the bounds of its fields. It stands at `path`."""
    if schedule.warmup_ratio and schedule.warmup_steps:
        words = f"is {schedule.warmup_ratio:g}, and warmup_steps is {schedule.warmup_steps}; state one of the two"
        yield Problem(f"{path}.warmup_ratio", words)
    if schedule.kind != "wsd":
        default = ScheduleConfig()
        for name in ("decay_ratio", "decay"):
            if getattr(schedule, name) != getattr(default, name):
                words = (
                    f"only `kind: wsd` has it, and the kind is {schedule.kind}; set {path}.kind: wsd, or leave it out"
                )
                yield Problem(f"{path}.{name}", words)
