"""What is wrong with an fsdp2 section by itself, beyond the bounds of its fields. Imports no torch."""

import re
from collections.abc import Iterable, Iterator

import attrs

from whet.component import Problem
from whet_fsdp2.config import Fsdp2Config, MuonConfig, OptimizerConfig, ScheduleConfig


def problems(config: Fsdp2Config, path: str) -> Iterator[Problem]:
    """Yield the problems of a section that stands at `path`."""
    yield from _schedule(config.schedule, f"{path}.schedule")
    yield from _optimizer(config.optimizer, f"{path}.optimizer")
    for number, target in enumerate(config.lora.targets if config.lora else ()):
        yield from _pattern(target, f"{path}.lora.targets.{number}")


def _schedule(schedule: ScheduleConfig, path: str) -> Iterator[Problem]:
    if schedule.warmup_ratio and schedule.warmup_steps:
        words = f"is {schedule.warmup_ratio:g}, and warmup_steps is {schedule.warmup_steps}; state one of the two"
        yield Problem(f"{path}.warmup_ratio", words)
    if schedule.kind != "wsd":
        for name in _set(schedule, ScheduleConfig(), ("decay_ratio", "decay")):
            words = f"only `kind: wsd` has it, and the kind is {schedule.kind}; set {path}.kind: wsd, or leave it out"
            yield Problem(f"{path}.{name}", words)


def _optimizer(optimizer: OptimizerConfig, path: str) -> Iterator[Problem]:
    if optimizer.kind != "muon":
        for name in _set(optimizer.muon, MuonConfig()):
            words = (
                f"only `kind: muon` has it, and the kind is {optimizer.kind}; set {path}.kind: muon, or leave it out"
            )
            yield Problem(f"{path}.muon.{name}", words)
    for number, group in enumerate(optimizer.groups):
        where = f"{path}.groups.{number}"
        yield from _pattern(group.match, f"{where}.match")
        if group.lr is not None and group.lr_factor != 1:
            words = f"is {group.lr_factor:g}, and lr is {group.lr:g}; state one of the two"
            yield Problem(f"{where}.lr_factor", words)


def _pattern(pattern: str, path: str) -> Iterator[Problem]:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield Problem(path, f"is no regular expression: {pattern!r}: {error}")


def _set(config: attrs.AttrsInstance, default: attrs.AttrsInstance, names: Iterable[str] = ()) -> list[str]:
    """Return the fields whose values are not the defaults, of the named fields or of all."""
    wanted = tuple(names) or tuple(attrs.fields_dict(type(config)))
    return [name for name in wanted if getattr(config, name) != getattr(default, name)]
