"""The learning rate as a pure function of the optimizer step."""

import math

from whet_fsdp2.config import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """Return the learning rate of an optimizer step, counted from 1. After `total_steps` the rate stays constant."""
    warmup = schedule.warmup_steps or round(schedule.warmup_ratio * total_steps)
    if step <= warmup:
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
    if schedule.kind == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    if schedule.kind == "wsd" and schedule.decay == "1-sqrt":
        return 1 - math.sqrt(done)  # Hägele et al. 2024, arXiv:2405.18392
    return 1 - done
