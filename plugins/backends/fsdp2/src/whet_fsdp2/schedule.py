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
    span = total_steps - warmup
    done = min((step - warmup) / span, 1.0) if span > 0 else 1.0
    height = 1 - done if schedule.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * height)
